"""Home Assistant: the MQTT discovery message of a camera, see https://www.home-assistant.io/integrations/mqtt.

Home Assistant reads the message, and shows a device with a sensor: the latest decision.
"""

import json

from ..version import __version__


def sensor(camera: str, decisions: str, availability: str) -> tuple[str, str]:
    """Return the topic and the message that announce the sensor of a camera.

    Args:
        camera: letters, digits, `_` and `-`.
        decisions: the topic of its decisions, JSON with `decision`.
        availability: the topic that says "online" or "offline".
    """
    identifier = f"protodcs_{camera}"
    message = {
        "name": "Decision",
        "unique_id": identifier,
        "state_topic": decisions,
        "value_template": "{{ value_json.decision }}",
        "json_attributes_topic": decisions,
        "availability_topic": availability,
        "icon": "mdi:image-search",
        "device": {"identifiers": [identifier], "name": f"ProtoDCS {camera}", "manufacturer": "ProtoDCS"},
        "origin": {"name": "ProtoDCS", "sw_version": __version__},
    }
    return f"homeassistant/sensor/{identifier}/config", json.dumps(message)
