"""The keys of the service: what the file holds, who is let in, and what the commands do."""

import json
import logging
import os
import re
import stat
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.errors import ConfigError, InputError
from protodcs.serve.access import keys as module
from protodcs.serve.access.keys import Caller, Keys, create_key, list_keys, revoke_key, rotate_key, without_keys

DAY = timedelta(days=1)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
def at_once(monkeypatch):
    """The file is looked at for every key."""
    monkeypatch.setattr(module, "_LOOK", 0.0)


def later(monkeypatch, by):
    """Let time go by."""
    moment = module._now() + by
    monkeypatch.setattr(module, "_now", lambda: moment)


def test_a_key_says_who_asks(file):
    for tenant, role in (("acme", "read"), ("acme", "observe"), ("rival", "admin")):
        record, key = create_key(file, tenant, role)
        assert Keys.open(file).caller(key) == Caller(tenant, role, record.id)
    assert len({record.salt for record in list_keys(file)}) == 3


def test_the_file_holds_no_secret_and_only_its_owner_may_read_it(file):
    mask = os.umask(0)
    try:
        record, key = create_key(file, "acme", "admin")
        revoke_key(file, record.id)
    finally:
        os.umask(mask)
    secret = key.rpartition("_")[2]
    assert len(secret) == 43
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [other.name for other in file.parent.iterdir()] == ["keys.json"]


def test_keys_are_drawn_anew_each_time(file):
    drawn = [create_key(file, "acme", "read")[1] for _ in range(20)]
    assert len(set(drawn)) == 20
    assert len({key.rpartition("_")[2] for key in drawn}) == 20
    assert all(re.fullmatch(r"pdcs_[a-z0-9]{12}_[A-Za-z0-9]{43}", key) for key in drawn)


def test_a_key_is_good_until_it_expires(file, monkeypatch):
    _, key = create_key(file, "acme", "read", lifetime=DAY)
    keys = Keys.open(file)
    later(monkeypatch, DAY - timedelta(minutes=1))
    assert keys.caller(key) is not None
    later(monkeypatch, timedelta(minutes=2))
    assert keys.caller(key) is None


def test_a_revoked_key_is_refused_by_who_has_the_file_open(file, at_once):
    record, key = create_key(file, "acme", "read")
    _, other = create_key(file, "acme", "read")
    keys = Keys.open(file)
    revoked = revoke_key(file, record.id)
    assert keys.caller(key) is None
    assert keys.caller(other) is not None
    assert revoke_key(file, record.id) == revoked


def test_the_file_is_looked_at_once_a_second(file, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    record, key = create_key(file, "acme", "read")
    keys = Keys.open(file)
    revoke_key(file, record.id)
    clock[0] += 0.9
    assert keys.caller(key) is not None
    clock[0] += 0.2
    assert keys.caller(key) is None


def test_after_a_rotation_both_keys_hold_until_the_grace_is_over(file, monkeypatch, at_once):
    old, old_key = create_key(file, "acme", "observe", lifetime=30 * DAY)
    keys = Keys.open(file)
    new, new_key = rotate_key(file, old.id, DAY)
    assert (new.tenant, new.role) == ("acme", "observe")
    assert new.expires - new.created == 30 * DAY
    assert keys.caller(old_key) == Caller("acme", "observe", old.id)
    assert keys.caller(new_key) == Caller("acme", "observe", new.id)
    later(monkeypatch, DAY)
    assert keys.caller(old_key) is None
    assert keys.caller(new_key) is not None


def test_a_grace_makes_no_key_live_longer(file):
    record, _ = create_key(file, "acme", "read", lifetime=DAY)
    rotate_key(file, record.id, 30 * DAY)
    assert list_keys(file)[0].expires == record.expires


def test_a_key_that_has_ended_or_was_rotated_is_not_rotated(file):
    record, _ = create_key(file, "acme", "read")
    rotate_key(file, record.id, DAY)
    with pytest.raises(InputError, match="rotated already"):
        rotate_key(file, record.id, DAY)
    revoke_key(file, record.id)
    with pytest.raises(InputError, match="revoked already"):
        rotate_key(file, record.id, DAY)
    assert len(list_keys(file)) == 2


def kinds_of_bad_keys(file):
    """A key that is bad in each way there is, and the file that refuses them."""
    _, good = create_key(file, "acme", "admin")
    revoked, revoked_key = create_key(file, "acme", "admin")
    revoke_key(file, revoked.id)
    _, expired_key = create_key(file, "acme", "admin", lifetime=timedelta(0))
    name, _, secret = good.removeprefix("pdcs_").partition("_")
    turned = secret[:-1] + ("a" if secret[-1] != "a" else "b")
    return good, {
        "none": "",
        "garbage": "garbage",
        "another kind": f"sk_{name}_{secret}",
        "unknown id": f"pdcs_{'0' * 12}_{secret}",
        "wrong secret": f"pdcs_{name}_{'0' * 43}",
        "nearly right": f"pdcs_{name}_{turned}",
        "too short": good[:-1],
        "too long": good + "a",
        "a line more": good + "\n",
        "not ascii": f"pdcs_{name}_" + "\u00e9" * 43,
        "digits of others": f"pdcs_{name}_" + "\u0661" * 43,
        "a secret of another": f"pdcs_{name}_{revoked_key[-43:]}",
        "revoked": revoked_key,
        "expired": expired_key,
    }


def test_a_bad_key_is_refused_by_the_same_steps_whatever_is_wrong_with_it(file, monkeypatch):
    good, bad = kinds_of_bad_keys(file)
    keys = Keys.open(file)
    steps = []

    def watched(owner, name):
        inner = getattr(owner, name)

        def outer(*values):
            steps.append(name)
            return inner(*values)

        monkeypatch.setattr(owner, name, outer)

    watched(module, "_hashed")
    watched(module.hmac, "compare_digest")
    watched(module.Key, "ended")
    assert keys.caller(good) is not None
    expected = [*steps]
    assert expected == ["_hashed", "compare_digest", "ended"]
    for kind, key in bad.items():
        steps.clear()
        assert keys.caller(key) is None, kind
        assert steps == expected, kind


@given(st.text() | st.from_regex(r"\Apdcs_[a-z0-9]{12}_[A-Za-z0-9]{43}\Z"))
@example("pdcs_" * 10_000)
def test_no_text_whatever_is_a_key_by_chance(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    create_key(file, "acme", "admin")
    assert Keys.open(file).caller(text) is None


def test_what_was_claimed_is_told_of_keys_that_were_made(file):
    good, bad = kinds_of_bad_keys(file)
    keys = Keys.open(file)
    made = {record.id for record in list_keys(file)}
    claimed = {kind: keys.claimed(key) for kind, key in bad.items()}
    assert claimed["revoked"] in made
    assert claimed["wrong secret"] == good[5:17]
    assert claimed["unknown id"] is claimed["garbage"] is claimed["none"] is None


def test_a_text_for_a_log_holds_no_key(file):
    _, key = create_key(file, "acme", "admin")
    for text in (key, f"a {key} b", key[:-5], f"{key}{key}"):
        assert key[18:30] not in without_keys(text)
    assert without_keys("camera-7") == "camera-7"


# Files.


def damaged(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(schema_version=2), "upgrade"),
        (lambda content: content.update(schema_version="new"), "damaged at schema_version"),
        (lambda content: content.update(more=1), "damaged at more"),
        (lambda content: content["keys"].append(7), "damaged at keys.1"),
        (lambda content: content["keys"].append(content["keys"][0]), "an id twice"),
        (lambda content: content["keys"][0].update(role="root"), "damaged at keys.0.role"),
        (lambda content: content["keys"][0].update(tenant="a/b"), "damaged at keys.0.tenant"),
        (lambda content: content["keys"][0].update(tenant=""), "damaged at keys.0.tenant"),
        (lambda content: content["keys"][0].update(hash=""), "damaged at keys.0.hash"),
        (lambda content: content["keys"][0].update(salt="zz"), "damaged at keys.0.salt"),
        (lambda content: content["keys"][0].update(expires="soon"), "damaged at keys.0.expires"),
        (lambda content: content["keys"][0].update(expires="2030-01-01T00:00:00"), "damaged at keys.0.expires"),
    ],
)
def test_a_damaged_file_is_refused_in_words_that_quote_nothing_of_it(file, change, words):
    record, _ = create_key(file, "acme", "admin")
    damaged(file, change)
    for use in (Keys.open, list_keys, lambda path: create_key(path, "acme", "read")):
        with pytest.raises(ConfigError, match=words) as refused:
            use(file)
        assert record.hash not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"keys": 7}'])
def test_a_file_of_something_else_is_refused(file, content):
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        Keys.open(file)


def test_a_file_that_is_not_there_is_refused(file):
    with pytest.raises(ConfigError, match="protodcs keys create"):
        Keys.open(file)
    with pytest.raises(InputError, match="holds no key"):
        revoke_key(file, "0" * 12)
    assert not file.exists()


def test_a_file_that_others_may_write_to_is_refused(file):
    create_key(file, "acme", "admin")
    file.chmod(0o620)
    with pytest.raises(ConfigError, match="others may write"):
        Keys.open(file)


def test_a_file_that_turns_bad_changes_nothing_and_is_told_once(file, at_once, caplog):
    _, key = create_key(file, "acme", "admin")
    keys = Keys.open(file)
    good = file.read_bytes()
    file.write_bytes(b"{")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert keys.caller(key) is not None
    assert len(caplog.records) == 1
    file.unlink()
    assert keys.caller(key) is not None
    file.write_bytes(good)
    file.chmod(0o600)
    _, other = create_key(file, "acme", "read")
    assert keys.caller(other) is not None


def test_a_link_to_the_file_may_be_changed_to_another_one(tmp_path, at_once):
    _, first = create_key(tmp_path / "first.json", "acme", "admin")
    _, second = create_key(tmp_path / "second.json", "acme", "admin")
    link = tmp_path / "keys.json"
    link.symlink_to("first.json")
    keys = Keys.open(link)
    assert keys.caller(first) is not None
    link.unlink()
    link.symlink_to("second.json")
    assert keys.caller(first) is None
    assert keys.caller(second) is not None


def test_commands_at_the_same_time_lose_nothing(file):
    threads = [threading.Thread(target=lambda: [create_key(file, "acme", "read") for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list_keys(file)) == 40


# Commands.


def run(*words):
    return CliRunner().invoke(app, ["keys", *map(str, words)])


def told(*words):
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_life_of_a_key_by_commands(file):
    made = told("create", "--file", file, "--tenant", "acme", "--role", "observe", "--days", 30)
    assert Keys.open(file).caller(made["key"]) == Caller("acme", "observe", made["id"])
    new = told("rotate", made["id"], "--file", file, "--grace-hours", 1)
    ended = told("revoke", made["id"], "--file", file)
    assert ended["successor"] == new["id"]
    keys = Keys.open(file)
    assert keys.caller(made["key"]) is None
    assert keys.caller(new["key"]) == Caller("acme", "observe", new["id"])
    listed = told("list", "--file", file)["keys"]
    assert [(key["id"], key["condition"]) for key in listed] == [(made["id"], "revoked"), (new["id"], "good")]
    shown = run("list", "--file", file).output
    assert all(key["id"] in shown for key in listed)
    for secret in (made["key"][-43:], new["key"][-43:]):
        assert secret not in shown + json.dumps(listed)


def test_a_new_key_is_printed_in_one_line(file):
    output = run("create", "--file", file, "--tenant", "acme", "--role", "read").output
    (key,) = re.findall(r"^key: (pdcs_\w+)$", output, re.MULTILINE)
    assert Keys.open(file).caller(key) is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "--tenant", "Acme", "--role", "read"], "tenant: wanted"),
        (["create", "--tenant", "a/b", "--role", "read"], "tenant: wanted"),
        (["create", "--tenant", "a" * 41, "--role", "read"], "tenant: wanted"),
        (["create", "--tenant", "acme", "--role", "root"], "wanted: read, observe, admin"),
        (["create", "--tenant", "acme", "--role", "read", "--days", "-1"], "--days must be"),
        (["create", "--tenant", "acme", "--role", "read", "--days", "nan"], "--days must be"),
        (["create", "--tenant", "acme", "--role", "read", "--days", "1e300"], "--days must be"),
        (["list"], "cannot be read"),
        (["revoke", "x"], "holds no key 'x'"),
        (["rotate", "x"], "holds no key 'x'"),
    ],
)
def test_a_mistake_is_told_in_words_and_writes_nothing(file, words, said):
    result = run(*words, "--file", file)
    assert result.exit_code == 1
    assert said in result.output
    assert not file.exists()


def test_a_whole_key_given_by_mistake_is_not_repeated(file):
    made = told("create", "--file", file, "--tenant", "acme", "--role", "observe")
    result = run("revoke", made["key"], "--file", file)
    assert result.exit_code == 1
    assert made["key"][-43:] not in result.output


def test_the_service_knows_no_pickle():
    for source in Path(module.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(import|from) (cloud)?pickle|allow_pickle=True", source.read_text(), re.MULTILINE)
