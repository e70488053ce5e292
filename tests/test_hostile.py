"""Thousands of hostile requests and connections, with honest streams beside them."""

import os
import time
from functools import partial

import pytest

from conftest import random_stream
from protodcs.serve.access.keys import create_key
from service.attack_run import Attackers, Honest, attack_service, prepare
from service.hostile import Hostile
from service.rig import Service

BODY_SECONDS = 5.0


@pytest.mark.long
async def test_5000_attacks_do_not_end_it_and_disturb_no_honest_stream(tmp_path, data_folder):
    seed = int(os.environ.get("PROTODCS_HOSTILE_SEED", time.time()))
    count = int(os.environ.get("PROTODCS_HOSTILE_COUNT", 5000))
    print(f"PROTODCS_HOSTILE_SEED={seed}")
    keys = tmp_path / "keys.json"
    mallory, acme = (create_key(keys, tenant, "admin")[1] for tenant in ("mallory", "acme"))
    rows, features, _ = random_stream(samples=2000, seed=11)
    service = Service(
        tmp_path,
        store=f"sqlite:{tmp_path}/store",
        encoder="mini",
        keys=str(keys),
        audit=str(tmp_path / "audit.jsonl"),
        body_seconds=BODY_SECONDS,
        log_level="warning",
    )
    with service:
        caller = {"authorization": f"Bearer {mallory}"}
        prepare(service.base_url, rows, caller)
        key = f"authorization: Bearer {mallory}".encode()
        hostile = partial(Hostile, seed, data_folder, rows, features, BODY_SECONDS, (key,))
        attackers = Attackers(hostile, count, rounds=5, quiet=300)
        honest = Honest(rows, features, 3, {"authorization": f"Bearer {acme}"})
        report = await attack_service(service.base_url, service.pid, attackers, honest)
    print(report)
    assert not report.faults, "\n".join(report.faults[:50])
    assert len(report.outcomes) == count
