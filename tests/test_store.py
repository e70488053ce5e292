"""Stores of streams: what all of them promise."""

import asyncio
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from memory_store import MemoryStore, stored_ids, stored_stream
from protodcs import StreamDCSConfig
from protodcs.core.prototypes import Prototypes
from protodcs.errors import ConfigError, FencedError, HeldError, StoreError, UnknownStreamError
from protodcs.serve.messages import Action, ReplyStatus, Request
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store.values import Batch, Checkpoint, Fence, KeySegment, Takeover
from protodcs.serve.stream.live_stream import StreamSpec
from protodcs.serve.stream.shared import pack_prototypes
from protodcs.serve.workers.worker import Worker
from store_contract import BLOB, STORES, StoreMachine, begun, of_every_store, of_shared_stores, older

ODD_IDS = ["", " ", "a:b", "meta:a", "../up", "a/b", "\n\r\0", "*?[a]", "{a}", "\u00e9", "e\u0301", "\U0001f600", "%2e",
           "a" * 2000, "\ud800", "\ud83d\ude00", "A", "a", ".", "..", "-rf", "CON"]  # fmt: skip


async def tail(store, stream="s", incarnation="1"):
    return (await store.acquire(stream, "one", incarnation)).tail


# What every store does.


@of_every_store
async def test_a_new_stream_loads_with_its_spec_and_nothing_else(store):
    assert await store.create("s", b"spec", BLOB)
    held = await store.acquire("s", "one", "1")
    assert (held.spec, held.snapshot, held.start, held.tail, held.position) == (b"spec", None, 0, [], 0)


@of_every_store
async def test_a_stream_is_created_once_whatever_its_spec(store):
    assert await store.create("s", b"first", BLOB)
    assert not await store.create("s", b"second", BLOB)
    assert (await stored_stream(store, "s")).spec == b"first"


@of_every_store
async def test_what_was_never_created_is_unknown(store):
    with pytest.raises(UnknownStreamError, match="nobody"):
        await store.acquire("nobody", "one", "1")
    with pytest.raises(UnknownStreamError, match="nobody"):
        await store.describe("nobody")
    await store.release("nobody", Fence(1))
    assert await store.saved_snapshots("nobody") == []
    assert await store.saved_snapshot("nobody", "x") is None
    for attempt in (
        store.save_snapshot("nobody", Fence(1), "x", b""),
        store.delete_snapshot("nobody", Fence(1), "x"),
        store.delete("nobody", Fence(1)),
    ):
        with pytest.raises(FencedError, match="nobody"):
            await attempt
    assert await stored_ids(store) == []


@of_every_store
async def test_records_come_back_in_order_and_to_the_byte(store):
    fence = await begun(store)
    records = [b"", b"\0", b"\r\n", bytes(range(256)), b"$-1\r\n", random.Random(0).randbytes(300_000)]
    assert await store.commit([Batch("s", fence, 0, records[:2]), Batch("s", fence, 2, records[2:])]) == [None, None]
    assert await tail(store) == records


@of_every_store
async def test_each_acquisition_raises_the_epoch(store):
    fences = [await begun(store), *[(await store.acquire("s", "one", "1")).fence for _ in range(3)]]
    assert fences == sorted(set(fences))
    assert (await stored_stream(store, "s")).epoch == fences[-1].epoch


@of_every_store
async def test_a_checkpoint_cuts_the_records_that_it_covers_and_no_others(store):
    fence = await begun(store)
    await store.commit([Batch("s", fence, 0, [b"0", b"1", b"2"]), Checkpoint("s", fence, 2, b"snapshot")])
    await store.commit([Batch("s", fence, 3, [b"3"])])
    held = await store.acquire("s", "one", "1")
    assert (held.snapshot, held.start, held.tail, held.position) == (b"snapshot", 2, [b"2", b"3"], 4)


@of_every_store
async def test_a_checkpoint_of_all_leaves_an_empty_journal_that_goes_on(store):
    fence = await begun(store)
    await store.commit([Batch("s", fence, 0, [b"0", b"1"]), Checkpoint("s", fence, 2, b"a")])
    await store.commit([Batch("s", fence, 2, [b"2"]), Checkpoint("s", fence, 3, b"b")])
    held = await store.acquire("s", "one", "1")
    assert (held.snapshot, held.start, held.tail) == (b"b", 3, [])
    assert await store.commit([Batch("s", held.fence, 3, [b"3"])]) == [None]


@of_every_store
async def test_a_checkpoint_adds_a_segment_of_keys_and_keeps_those_between_two_positions(store):
    fence = await begun(store)
    batch = Batch("s", fence, 0, [b"%d" % number for number in range(9)])
    writes = [
        *(Checkpoint("s", fence, 2 * number, b"snapshot", b"keys %d" % number, (0, 7)) for number in range(1, 5)),
        Checkpoint("s", fence, 9, b"snapshot", b"", (4, 6)),
    ]
    assert await store.commit([batch, *writes]) == [None] * 6
    used = await store.usage()
    held = await store.acquire("s", "one", "1")
    assert list(held.keys) == [KeySegment(4, b"keys 2"), KeySegment(6, b"keys 3")]
    assert await store.commit([dataclasses.replace(writes[-1], fence=held.fence)]) == [None]
    assert await store.usage() == used
    held = await store.acquire("s", "one", "1")
    assert [position for position, _ in held.keys] == [4, 6]
    await store.delete("s", held.fence)
    assert await store.usage() == {}
    await store.put_shared(BLOB, b"blob")
    await begun(store)
    assert not (await store.acquire("s", "one", "1")).keys


@of_every_store
async def test_a_batch_may_hold_thousands_of_records(store):
    fence = await begun(store)
    records = [b"%d" % number for number in range(12_345)]
    assert await store.commit([Batch("s", fence, 0, records)]) == [None]
    assert await tail(store) == records


@of_every_store
async def test_an_empty_commit_is_fine(store):
    assert await store.commit([]) == []


@of_every_store
async def test_a_stale_epoch_can_write_nothing_at_all(store):
    stale = await begun(store)
    await store.commit([Batch("s", stale, 0, [b"0"])])
    await store.save_snapshot("s", stale, "kept", b"good")
    fence = (await store.acquire("s", "one", "2")).fence
    before = await stored_stream(store, "s")

    refused = await store.commit([Batch("s", stale, 1, [b"bad"]), Checkpoint("s", stale, 1, b"bad")])
    assert [type(answer) for answer in refused] == [FencedError, FencedError]
    assert str(fence.epoch) in str(refused[0])
    for attempt in (
        store.save_snapshot("s", stale, "kept", b"bad"),
        store.save_snapshot("s", stale, "other", b"bad"),
        store.delete_snapshot("s", stale, "kept"),
        store.delete("s", stale),
    ):
        with pytest.raises(FencedError, match="epoch"):
            await attempt
    await store.release("s", stale)

    assert await stored_stream(store, "s") == before
    assert (await store.saved_snapshots("s"), await store.saved_snapshot("s", "kept")) == (["kept"], b"good")
    held = await store.acquire("s", "one", "2")
    assert (held.snapshot, held.tail) == (None, [b"0"])


@of_every_store
async def test_an_epoch_that_was_never_given_out_can_write_nothing(store):
    fence = await begun(store)
    refused = await store.commit([Batch("s", older(fence, -1), 0, [b"bad"])])
    assert isinstance(refused[0], FencedError)
    assert await tail(store) == []


@of_every_store
async def test_a_repetition_from_an_older_epoch_is_fenced_though_its_records_are_there(store):
    stale = await begun(store)
    batch = Batch("s", stale, 0, [b"0"])
    await store.commit([batch])
    await store.acquire("s", "one", "2")
    assert isinstance((await store.commit([batch]))[0], FencedError)


@of_every_store
async def test_one_fenced_write_among_good_ones_spoils_nothing(store):
    a, b, c = [await begun(store, stream) for stream in "abc"]
    await store.acquire("b", "one", "2")
    refused = await store.commit(
        [
            Batch("a", a, 0, [b"a0"]),
            Batch("b", b, 0, [b"bad"]),
            Batch("c", c, 0, [b"c0"]),
            Checkpoint("b", b, 0, b"bad"),
            Batch("a", a, 1, [b"a1"]),
        ]
    )
    assert [answer is None for answer in refused] == [True, False, True, False, True]
    assert await tail(store, "a") == [b"a0", b"a1"]
    assert await tail(store, "b") == []
    assert await tail(store, "c") == [b"c0"]


@of_every_store
async def test_a_repeated_commit_is_done_once(store):
    fence = await begun(store)
    writes = [
        Batch("s", fence, 0, [b"0", b"1"]),
        Checkpoint("s", fence, 1, b"early"),
        Batch("s", fence, 2, [b"2"]),
        Checkpoint("s", fence, 3, b"late"),
        Batch("s", fence, 3, [b"3", b"4"]),
    ]
    assert await asyncio.gather(*(store.commit(writes) for _ in range(3))) == [[None] * 5] * 3
    assert await store.commit(writes) == [None] * 5
    held = await store.acquire("s", "one", "1")
    assert (held.snapshot, held.start, held.tail) == (b"late", 3, [b"3", b"4"])


@of_every_store
async def test_snapshots_of_records_from_an_earlier_epoch_are_repeated_and_done_once(store):
    await store.commit([Batch("s", await begun(store), 0, [b"0", b"1", b"2"])])
    fence = (await store.acquire("s", "one", "1")).fence
    writes = [Checkpoint("s", fence, 1, b"early"), Checkpoint("s", fence, 2, b"late")]
    for _ in range(2):
        assert await store.commit(writes) == [None, None]
    held = await store.acquire("s", "one", "1")
    assert (held.snapshot, held.start, held.tail) == (b"late", 2, [b"2"])


@of_every_store
async def test_who_is_wrong_about_a_stream_is_fenced_and_its_neighbours_are_not(store):
    fence, other = await begun(store), await begun(store, "other")
    await store.commit([Batch("s", fence, 0, [b"0", b"1"])])
    wrong = [
        Batch("s", fence, 3, [b"behind a gap"]),
        Batch("s", fence, 1, [b"1", b"there in part"]),
        Batch("s", fence, 0, [b"0", b"another"]),
        Checkpoint("s", fence, 3, b"of more than there is"),
    ]
    *refused, fine = await store.commit([*wrong, Batch("other", other, 0, [b"0"])])
    for write, answer in zip(wrong, refused, strict=True):
        assert isinstance(answer, FencedError)
        assert f"position {write.position}" in str(answer)
    assert fine is None
    assert await tail(store, "other") == [b"0"]
    held = await store.acquire("s", "one", "1")
    assert (held.snapshot, held.tail) == (None, [b"0", b"1"])


@of_every_store
async def test_what_an_earlier_epoch_wrote_is_no_repetition(store):
    await store.commit([Batch("s", await begun(store), 0, [b"0", b"1"])])
    later = (await store.acquire("s", "one", "1")).fence
    refused = await store.commit([Batch("s", later, 0, [b"0", b"1"]), Checkpoint("s", later, 2, b"all")])
    assert [type(answer) for answer in refused] == [FencedError, type(None)]
    latest = (await store.acquire("s", "one", "1")).fence
    assert isinstance((await store.commit([Checkpoint("s", latest, 1, b"older")]))[0], FencedError)
    assert (await store.acquire("s", "one", "1")).snapshot == b"all"


@of_every_store
async def test_who_gave_a_stream_up_may_write_until_another_takes_it(store):
    fence = await begun(store)
    await store.release("s", fence)
    await store.resign("one", "1")
    assert await store.commit([Batch("s", fence, 0, [b"0"]), Checkpoint("s", fence, 1, b"snapshot")]) == [None, None]
    await store.save_snapshot("s", fence, "x", b"kept")
    held = await store.acquire("s", "two", "1")
    assert (held.snapshot, held.start, await store.saved_snapshots("s")) == (b"snapshot", 1, ["x"])
    assert isinstance((await store.commit([Batch("s", fence, 1, [b"bad"])]))[0], FencedError)


@of_every_store
async def test_a_write_to_a_deleted_stream_is_fenced(store):
    fence = await begun(store)
    await store.delete("s", fence)
    refused = await store.commit([Batch("s", fence, 0, [b"0"]), Checkpoint("s", fence, 0, b"snapshot")])
    assert all(isinstance(answer, FencedError) for answer in refused)
    with pytest.raises(FencedError):
        await store.save_snapshot("s", fence, "x", b"bad")
    with pytest.raises(FencedError):
        await store.delete("s", fence)
    with pytest.raises(UnknownStreamError):
        await stored_stream(store, "s")


@of_every_store
async def test_a_deleted_stream_leaves_nothing_to_one_of_the_same_name(store):
    fence = await begun(store)
    await store.commit([Batch("s", fence, 0, [b"0", b"1"]), Checkpoint("s", fence, 1, b"old")])
    await store.save_snapshot("s", fence, "x", b"old")
    await store.delete("s", fence)
    assert await stored_ids(store) == []
    await store.put_shared(BLOB, b"blob")
    assert await store.create("s", b"new", BLOB)
    held = await store.acquire("s", "one", "1")
    assert (held.spec, held.snapshot, held.start, held.tail) == (b"new", None, 0, [])
    assert await store.saved_snapshots("s") == []


@of_every_store
async def test_who_held_a_stream_in_its_former_life_is_fenced_in_the_next(store):
    former = await begun(store)
    another = await begun(store, "another")
    await store.delete("s", (await store.acquire("s", "one", "1")).fence)
    await store.delete("another", another)
    await store.put_shared(BLOB, b"blob")
    assert await store.create("s", b"", BLOB)
    # Before it has a worker again, and after.
    for _ in range(2):
        refused = await store.commit([Batch("s", former, 0, [b"bad"]), Batch("s", older(former, -1), 0, [b"bad"])])
        assert [type(answer) for answer in refused] == [FencedError, FencedError]
        assert await tail(store) == []


@of_every_store
async def test_kept_snapshots_are_listed_oldest_first_and_replaced_by_name(store):
    fence = await begun(store)
    for name in ("b", "a", "c"):
        await store.save_snapshot("s", fence, name, name.encode())
    assert await store.saved_snapshots("s") == ["b", "a", "c"]
    await store.save_snapshot("s", fence, "b", b"again")
    assert await store.saved_snapshots("s") == ["a", "c", "b"]
    assert await store.saved_snapshot("s", "b") == b"again"
    await store.delete_snapshot("s", fence, "c")
    await store.delete_snapshot("s", fence, "never there")
    assert await store.saved_snapshots("s") == ["a", "b"]
    assert await store.saved_snapshot("s", "c") is None
    # They stand beside the newest snapshot.
    assert (await store.acquire("s", "one", "1")).snapshot is None


@of_every_store
async def test_a_record_may_cover_several_positions(store):
    fence = await begun(store)
    batch = Batch("s", fence, 0, [b"0", b"1 to 3", b"4"], positions=[1, 3, 1])
    for _ in range(2):
        assert await store.commit([batch]) == [None]
    assert (await stored_stream(store, "s")).position == 5
    wrong = [
        Batch("s", fence, 0, [b"0", b"1 to 3", b"4"]),
        Batch("s", fence, 0, [b"0", b"1 to 3", b"4"], positions=[1, 1, 3]),
        Batch("s", fence, 3, [b"1 to 3"]),
        Checkpoint("s", fence, 2, b"within a record"),
    ]
    for write in wrong:
        assert isinstance((await store.commit([write]))[0], FencedError)
    assert await store.commit([Checkpoint("s", fence, 4, b"snapshot"), batch]) == [None, None]
    assert await store.commit([Batch("s", fence, 5, [b"5 and 6"], positions=[2])]) == [None]
    held = await store.acquire("s", "one", "1")
    assert (held.snapshot, held.start, held.tail, held.position) == (b"snapshot", 4, [b"4", b"5 and 6"], 7)


@of_every_store
async def test_a_shared_blob_lives_as_long_as_a_stream_uses_it(store):
    await store.put_shared("fingerprint", b"prototypes")
    await store.put_shared("fingerprint", b"prototypes")
    assert await store.create("a", b"", "fingerprint")
    assert await store.create("b", b"", "fingerprint")
    await store.delete("a", (await store.acquire("a", "one", "1")).fence)
    assert await store.get_shared("fingerprint") == b"prototypes"
    await store.delete("b", (await store.acquire("b", "one", "1")).fence)
    with pytest.raises(StoreError, match="fingerprint"):
        await store.get_shared("fingerprint")
    assert await store.get_shared(BLOB) == b"blob"


@of_every_store
async def test_a_stream_may_use_several_shared_blobs(store):
    await store.put_shared("one", b"1" * 1000)
    await store.put_shared("two", b"2" * 2000)
    with pytest.raises(StoreError, match="nowhere"):
        await store.create("acme/both", b"", "one", "nowhere")
    assert await store.create("acme/both", b"", "one", "two")
    assert await store.create("acme/second", b"", "two")
    assert (await store.usage())["acme"] == 3000
    await store.delete("acme/both", (await store.acquire("acme/both", "one", "1")).fence)
    assert [await store.has_shared(name) for name in ("one", "two")] == [False, True]
    assert (await store.usage())["acme"] == 2000
    await store.delete("acme/second", (await store.acquire("acme/second", "one", "1")).fence)
    assert not await store.has_shared("two")
    assert (await store.usage()).get("acme", 0) == 0


@of_every_store
async def test_no_stream_begins_without_its_shared_blob(store):
    with pytest.raises(StoreError, match="nowhere"):
        await store.create("s", b"", "nowhere")
    assert await stored_ids(store) == []
    # It may have gone with the last that used it, though it was put again before that.
    fence = await begun(store)
    await store.put_shared(BLOB, b"blob")
    await store.delete("s", fence)
    with pytest.raises(StoreError, match=BLOB):
        await store.create("t", b"", BLOB)
    await store.put_shared(BLOB, b"blob")
    assert await store.create("t", b"", BLOB)


@of_every_store
async def test_ids_and_names_may_hold_any_characters(store):
    for stream in ODD_IDS:
        fence = await begun(store, stream, stream.encode("utf-8", "surrogatepass"))
        await store.commit([Batch(stream, fence, 0, [b"record of %d" % ODD_IDS.index(stream)])])
        await store.save_snapshot(stream, fence, stream, b"kept")
    assert await stored_ids(store) == sorted(ODD_IDS)
    for number, stream in enumerate(ODD_IDS):
        held = await store.acquire(stream, "one", "1")
        assert held.spec == stream.encode("utf-8", "surrogatepass")
        assert held.tail == [b"record of %d" % number]
        assert await store.saved_snapshots(stream) == [stream]
        await store.delete(stream, held.fence)
    assert await stored_ids(store) == []


@of_every_store
async def test_the_streams_of_a_tenant_are_listed_in_pages_with_their_summaries(store):
    await store.put_shared(BLOB, b"blob")
    names = [f"acme/{number}" for number in range(7)] + ["acme/\u00e9", "acme2/1", "plain", "z"]
    for name in names:
        assert await store.create(name, b"spec", BLOB)
    held = await store.acquire("acme/3", "one", "1")
    assert await store.commit([Batch("acme/3", held.fence, 0, [b"record"], b"summary")]) == [None]
    found, after = [], None
    while page := await store.list_streams("acme", after, 3):
        found += page
        after = page[-1].id
    assert [stream.id for stream in found] == names[:8]
    assert [stream.summary for stream in found] == [b"summary" if number == 3 else b"" for number in range(8)]
    assert found[3].created == held.created > 0
    assert [stream.id for stream in await store.list_streams("", None, 10)] == ["plain", "z"]
    assert [await store.count_streams(tenant) for tenant in ("acme", "acme2", "", "none")] == [8, 1, 2, 0]
    await store.delete("acme/3", held.fence)
    assert await store.count_streams("acme") == 7


@of_every_store
async def test_a_thousand_streams_are_listed_each_once(store):
    names = [f"stream-{number}" for number in range(1000)]
    for name in names:
        await store.create(name, b"", BLOB)
    assert await stored_ids(store) == sorted(names)


@of_every_store
async def test_a_description_tells_the_position_the_worker_and_about_the_size(store):
    fence = await begun(store)
    empty = await stored_stream(store, "s")
    assert (empty.epoch, empty.worker, empty.position, empty.start) == (fence.epoch, "one", 0, 0)
    await store.commit([Batch("s", fence, 0, [b"r" * 2200] * 50)])
    journal = await stored_stream(store, "s")
    assert 0.9 * 110_000 < journal.size - empty.size < 1.6 * 110_000
    await store.commit([Checkpoint("s", fence, 40, b"s" * 300_000)])
    await store.save_snapshot("s", fence, "x", b"k" * 200_000)
    full = await stored_stream(store, "s")
    assert (full.position, full.start) == (50, 40)
    assert 0.9 * 522_000 < full.size - empty.size < 1.6 * 522_000
    await store.release("s", fence)
    assert (await stored_stream(store, "s")).worker is None


@of_every_store
async def test_the_usage_of_a_tenant_follows_what_its_streams_hold(store):
    async def used(tenant):
        return (await store.usage()).get(tenant, 0)

    other = await begun(store, "other/s")
    others = await used("other")
    assert others >= len(b"spec" + b"blob")
    fence = await begun(store, "mine/s")
    assert await used("mine") == others
    levels = [others]
    for write, grows in [
        (Batch("mine/s", fence, 0, [bytes(100), bytes(200)]), True),
        (Batch("mine/s", fence, 2, [bytes(5000)]), True),
        # It replaces the first two records, and the third one overtook it.
        (Checkpoint("mine/s", fence, 2, bytes(50)), False),
        (Checkpoint("mine/s", fence, 3, bytes(30), bytes(30)), False),
    ]:
        for _ in range(2):
            assert await store.commit([write]) == [None]
        levels.append(await used("mine"))
        assert (levels[-1] > levels[-2]) == grows
    assert levels[2] - levels[1] >= 5000
    assert 60 <= levels[-1] - others < 300
    await store.save_snapshot("mine/s", fence, "x", bytes(1000))
    await store.save_snapshot("mine/s", fence, "x", bytes(700))
    assert 700 <= await used("mine") - levels[-1] < 1000
    await store.delete_snapshot("mine/s", fence, "x")
    await store.delete_snapshot("mine/s", fence, "x")
    assert await used("mine") == levels[-1]
    # A blob counts once for each tenant.
    second = await begun(store, "mine/second")
    assert 0 < await used("mine") - levels[-1] < others
    await store.delete("mine/s", fence)
    assert await used("mine") == others
    await store.delete("mine/second", second)
    assert await used("mine") == 0
    assert await used("other") == others
    await store.delete("other/s", other)
    assert await store.usage() == {}


@of_every_store
async def test_totals_count_the_streams_of_all_tenants(store):
    await begun(store, "mine/s")
    await begun(store, "mine/t")
    await begun(store, "other/s")
    totals = await store.totals()
    assert (totals.streams, totals.bytes) == (3, sum((await store.usage()).values()))


@of_every_store
async def test_calls_may_come_all_at_once(store):
    fences = [await begun(store, f"s{number}") for number in range(60)]
    answers = await asyncio.gather(
        *(store.commit([Batch(f"s{number}", fence, 0, [b"%d" % number])]) for number, fence in enumerate(fences)),
    )
    assert answers == [[None]] * 60
    held = await asyncio.gather(*(store.acquire(f"s{number}", "one", "1") for number in range(60)))
    assert [one.tail for one in held] == [[b"%d" % number] for number in range(60)]


@pytest.mark.parametrize("name", STORES)
async def test_what_was_committed_is_there_when_the_store_is_opened_again(name, tmp_path):
    store = await STORES[name](tmp_path)
    await store.put_shared(BLOB, b"blob")
    for stream in ODD_IDS:
        await store.create(stream, b"odd", BLOB)
    fence = await begun(store)
    await store.commit([Batch("s", fence, 0, [b"0", b"1"]), Checkpoint("s", fence, 1, b"snapshot")])
    await store.save_snapshot("s", fence, "x", b"kept")
    await store.close()
    store = await STORES[name](tmp_path)
    held = await store.acquire("s", "one", "2")
    assert held.fence > fence
    assert (held.spec, held.snapshot, held.start, held.tail) == (b"spec", b"snapshot", 1, [b"1"])
    assert await store.saved_snapshot("s", "x") == b"kept"
    assert await stored_ids(store) == sorted([*ODD_IDS, "s"])
    assert {(await store.acquire(stream, "one", "2")).spec for stream in ODD_IDS} == {b"odd"}
    assert await store.get_shared(BLOB) == b"blob"
    await store.close()


@pytest.mark.parametrize("store", STORES)
def test_a_store_does_what_dictionaries_do_whatever_is_asked_of_it(store, tmp_path):
    async def there():
        await (await STORES[store](tmp_path)).close()

    # A store that cannot be tested here says so before hypothesis asks for it.
    asyncio.run(there())

    class Machine(StoreMachine):
        name = store

    run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.parametrize(("losses", "outcome"), [(1, ReplyStatus.DONE), (2, ReplyStatus.LATER)])
async def test_a_worker_puts_a_blob_again_once_that_went_before_its_stream_began(losses, outcome):
    class Fickle(MemoryStore):
        lost = 0

        async def put_shared(self, name, data):
            self.lost += 1
            if self.lost > losses:
                await super().put_shared(name, data)

    prototypes = Prototypes(np.eye(3, 8))
    config = StreamDCSConfig().model_dump()
    spec = StreamSpec(method="streamdcs", config=config, classes=["a", "b", "c"], prototypes=prototypes.fingerprint)
    request = Request("s", Action.CREATE, "key", spec.pack(), pack_prototypes(prototypes))
    worker = Worker("one", Fickle(), ServeConfig())
    await worker.start()
    (reply,) = await worker.pipeline.serve([request])
    await worker.close()
    assert reply.status is outcome


# Leases.


@of_every_store
async def test_a_lease_that_cannot_be_is_refused(store):
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="lease"):
            await store.renew("one", "1", seconds)


@of_every_store
async def test_a_live_holder_is_respected(store):
    fence = await begun(store)
    with pytest.raises(HeldError, match="one") as refused:
        await store.acquire("s", "two", "1")
    assert refused.value.worker == "one"
    assert await store.commit([Batch("s", fence, 0, [b"0"])]) == [None]


@of_every_store
async def test_a_holder_whose_lease_ran_out_is_not_respected(store):
    fence = await begun(store)
    await store.renew("one", "1", 0.03)
    await asyncio.sleep(0.08)
    assert (await stored_stream(store, "s")).worker is None
    assert (await store.acquire("s", "two", "1")).fence > fence
    assert isinstance((await store.commit([Batch("s", fence, 0, [b"bad"])]))[0], FencedError)


@of_every_store
async def test_a_lease_that_is_renewed_does_not_run_out(store):
    await begun(store)
    await store.renew("one", "1", 0.03)
    await store.renew("one", "1", 60)
    await asyncio.sleep(0.08)
    with pytest.raises(HeldError):
        await store.acquire("s", "two", "1")


@of_every_store
async def test_a_holder_that_resigned_is_not_respected(store):
    await begun(store)
    await store.resign("one", "1")
    assert (await stored_stream(store, "s")).worker is None
    await store.acquire("s", "two", "1")


@of_every_store
async def test_an_earlier_incarnation_cannot_resign_for_a_later_one(store):
    await store.renew("one", "2", 60, takes_over=True)
    assert await store.create("s", b"", BLOB)
    await store.acquire("s", "one", "2")
    await store.resign("one", "1")
    with pytest.raises(HeldError):
        await store.acquire("s", "two", "1")


@of_every_store
async def test_a_worker_takes_over_from_an_earlier_incarnation_of_its_name(store):
    fence = await begun(store)
    assert (await store.acquire("s", "one", "2")).fence > fence
    assert isinstance((await store.commit([Batch("s", fence, 0, [b"bad"])]))[0], FencedError)


@of_every_store
async def test_what_a_dead_incarnation_held_is_free_though_its_successor_lives(store):
    await begun(store)
    await store.renew("one", "2", 60, takes_over=True)
    await store.acquire("s", "two", "1")


@of_every_store
async def test_a_renewal_tells_who_held_the_lease_and_takes_it_from_nobody_who_lives(store):
    assert (await store.renew("new", "1", 60)).holder is None
    assert (await store.renew("new", "1", 60)).holder == "1"
    assert (await store.renew("new", "2", 60, takes_over=True)).holder == "1"
    # The first incarnation learns that it was replaced, and the lease stays with the second.
    assert (await store.renew("new", "1", 60)).holder == "2"
    assert (await store.renew("new", "2", 60)).holder == "2"
    await store.resign("new", "2")
    assert (await store.renew("new", "1", 60)).holder is None


@of_every_store
async def test_a_renewal_tells_the_time_of_the_store(store):
    first = (await store.renew("one", "1", 60)).time
    second = (await store.renew("one", "1", 60)).time
    assert 0 <= second - first < 600


@of_every_store
async def test_a_stream_that_is_created_again_is_another_incarnation(store):
    fence = await begun(store)
    first = (await stored_stream(store, "s")).incarnation
    await store.delete("s", fence)
    await store.put_shared(BLOB, b"blob")
    await begun(store)
    second = (await stored_stream(store, "s")).incarnation
    assert first
    assert second
    assert first != second
    assert (await store.acquire("s", "one", "1")).incarnation == second


@of_every_store
async def test_a_released_stream_goes_to_anyone_though_its_worker_lives(store):
    fence = await begun(store)
    await store.release("s", fence)
    await store.acquire("s", "two", "1")
    # A release that comes late must not take it away again.
    await store.renew("two", "1", 60)
    await store.release("s", fence)
    with pytest.raises(HeldError):
        await store.acquire("s", "one", "1")


@of_every_store
async def test_of_many_workers_that_want_a_stream_one_gets_it(store):
    assert await store.create("s", b"", BLOB)
    workers = [f"worker-{number}" for number in range(12)]
    await asyncio.gather(*(store.renew(worker, "1", 60) for worker in workers))
    got = await asyncio.gather(*(store.acquire("s", worker, "1") for worker in workers), return_exceptions=True)
    assert sorted(type(one).__name__ for one in got) == ["AcquiredStream"] + ["HeldError"] * 11


# Takeovers, and the list of workers.


@of_shared_stores
async def test_a_takeover_fences_a_holder_that_lives_and_its_renewal_says_so(store):
    fence = await begun(store)
    await begun(store, "another")
    assert (await store.renew("one", "1", 60)).taken == {}
    held = await store.acquire("s", "two", "1", Takeover("one", 60))
    assert held.fence > fence
    assert isinstance((await store.commit([Batch("s", fence, 0, [b"bad"])]))[0], FencedError)
    # Again, because the response to a renewal may be lost.
    for _ in range(2):
        assert (await store.renew("one", "1", 60)).taken == {"s": held.epoch}
    assert (await store.renew("two", "1", 60)).taken == {}


@of_shared_stores
async def test_a_takeover_takes_a_stream_from_the_named_holder_only(store):
    fence = await begun(store)
    with pytest.raises(HeldError, match="one"):
        await store.acquire("s", "two", "1", Takeover("three", 60))
    assert await store.commit([Batch("s", fence, 0, [b"0"])]) == [None]
    assert (await store.renew("one", "1", 60)).taken == {}


@of_shared_stores
async def test_a_stream_is_taken_again_only_after_a_pause(store):
    await begun(store)
    await store.renew("two", "1", 60)
    await store.acquire("s", "two", "1", Takeover("one", 0.1))
    with pytest.raises(HeldError, match="two"):
        await store.acquire("s", "one", "1", Takeover("two", 0.1))
    await asyncio.sleep(0.15)
    await store.acquire("s", "one", "1", Takeover("two", 0.1))


@of_shared_stores
async def test_a_takeover_of_a_free_stream_is_an_acquisition_as_any_other(store):
    await store.renew("two", "1", 60)
    await store.release("s", await begun(store))
    await store.acquire("s", "two", "1", Takeover("one", 60))
    assert (await store.renew("one", "1", 60)).taken == {}
    await store.acquire("s", "one", "1", Takeover("two", 60))


@of_every_store
async def test_documents_are_stored_by_kind_and_name(store):
    assert await store.documents("a") == {}
    assert await store.add_document("a", "one", b"1") == b"1"
    assert await store.add_document("a", "one", b"2") == b"1"
    await store.put_document("a", "one", b"3")
    await store.put_document("a", "\ud800/z", bytes(range(256)))
    await store.put_document("b", "one", b"")
    assert await store.documents("a") == {"one": b"3", "\ud800/z": bytes(range(256))}
    assert await store.delete_document("a", "one")
    assert not await store.delete_document("a", "one")
    assert list(await store.documents("a")) == ["\ud800/z"]
    assert await store.documents("b") == {"one": b""}
