"""The tables of a SQL store.

The statements are those of SQLite. PostgreSQL gets them with other names of types, and with what is in comments of the
form `/*+ ... */`, which SQLite ignores.
"""

import re
from functools import cache
from typing import Final

from ...errors import StoreError

LAYOUT: Final = 8
POSITION_BITS: Final = 32

# Specs, snapshots and records are apart from `streams`, so that an append changes few pages. The key of a record or log
# entry is the number of its stream and its position, so that those of a stream are one range of an index. SQLite stores
# records in the order in which they come, whatever their stream: inserted between others, each would move two or three.
# In PostgreSQL the log and its thumbnails have a table for each month, which can be dropped. Writers that share a
# database count the usage of a tenant in different rows, so that none of them waits for another one's commit.
TABLES: Final = """
CREATE TABLE streams (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE,
    tenant BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    start INTEGER NOT NULL DEFAULT 0,
    finish INTEGER NOT NULL DEFAULT 0,
    base INTEGER NOT NULL DEFAULT 0,
    covered_by INTEGER,
    state_bytes INTEGER NOT NULL,
    journal_bytes INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    summary BLOB NOT NULL DEFAULT x'',
    token TEXT NOT NULL DEFAULT 'nobody',
    worker BLOB,
    incarnation BLOB,
    moved_until REAL NOT NULL DEFAULT 0
) STRICT /*+ WITH (fillfactor = 70) */;
CREATE INDEX streams_by_tenant ON streams (tenant, id);
CREATE TABLE specs (stream INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE records (key INTEGER NOT NULL UNIQUE, positions INTEGER NOT NULL, data BLOB NOT NULL) STRICT;
CREATE TABLE snapshots (stream INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE request_keys (
    stream INTEGER NOT NULL, position INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (stream, position)
) STRICT;
CREATE TABLE saved (
    stream INTEGER NOT NULL, name BLOB NOT NULL, place INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (stream, name)
) STRICT;
CREATE TABLE blobs (name BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE uses (
    blob BLOB NOT NULL, tenant BLOB NOT NULL, stream INTEGER NOT NULL, PRIMARY KEY (blob, tenant, stream)
) STRICT, WITHOUT ROWID;
CREATE INDEX uses_by_stream ON uses (stream);
CREATE TABLE deleted (epoch INTEGER NOT NULL) STRICT;
INSERT INTO deleted VALUES (0);
CREATE TABLE documents (
    kind TEXT NOT NULL, name BLOB NOT NULL, data BLOB NOT NULL, PRIMARY KEY (kind, name)
) STRICT;
CREATE TABLE notices (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant BLOB NOT NULL,
    stream INTEGER NOT NULL,
    position INTEGER NOT NULL,
    number INTEGER NOT NULL,
    time INTEGER NOT NULL,
    kind TEXT NOT NULL,
    content TEXT NOT NULL,
    UNIQUE (stream, position, number)
) STRICT;
CREATE INDEX notices_by_tenant ON notices (tenant, id);
CREATE TABLE log_classes (
    number INTEGER PRIMARY KEY /*+ GENERATED ALWAYS AS IDENTITY */, name BLOB NOT NULL UNIQUE
) STRICT;
CREATE TABLE log (
    key INTEGER,
    time INTEGER NOT NULL,
    request ANY NOT NULL,
    image_ref TEXT,
    outcome INTEGER NOT NULL,
    nearest INTEGER NOT NULL,
    p_unknown REAL,
    score REAL,
    reason INTEGER,
    thumbnail INTEGER NOT NULL,
    PRIMARY KEY (key /*+ , time */)
) STRICT /*+ PARTITION BY RANGE (time) */;
CREATE INDEX log_by_outcome ON log (outcome /*+ , key */);
CREATE INDEX log_by_class ON log (nearest, outcome /*+ , key */);
CREATE INDEX log_by_image ON log (image_ref /*+ , key */) WHERE image_ref IS NOT NULL;
CREATE TABLE log_thumbnails (
    key INTEGER, data BLOB NOT NULL, time INTEGER NOT NULL, PRIMARY KEY (key /*+ , time */)
) STRICT /*+ PARTITION BY RANGE (time) */;
CREATE TABLE log_roll_backs (
    stream INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (stream, first, last)
) STRICT, WITHOUT ROWID;
CREATE TABLE log_deleted (stream INTEGER PRIMARY KEY) STRICT;
CREATE TABLE unused (name BLOB PRIMARY KEY, size INTEGER NOT NULL, put REAL NOT NULL) STRICT;
CREATE TABLE usage (
    tenant BLOB NOT NULL,
    shard INTEGER NOT NULL,
    streams INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    log_bytes INTEGER NOT NULL,
    PRIMARY KEY (tenant, shard)
) STRICT, WITHOUT ROWID /*+ WITH (fillfactor = 50) */;
CREATE TABLE log_sizes (
    stream INTEGER NOT NULL,
    month INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (stream, month)
) STRICT, WITHOUT ROWID /*+ WITH (fillfactor = 50) */;
CREATE INDEX log_sizes_by_month ON log_sizes (month);
"""

# Bytes of an entry of the log: image reference, thumbnail, and what all entries take, indexes included.
ENTRY_BYTES: Final = 110
ENTRY_SIZE: Final = f"{ENTRY_BYTES} + coalesce(octet_length(image_ref), 0) + thumbnail"

# The usage of tenants, from all streams.
USAGE: Final = """
SELECT tenant, 0, CAST(sum(streams) AS BIGINT), CAST(sum(bytes) AS BIGINT), CAST(sum(log_bytes) AS BIGINT) FROM (
    SELECT tenant, 1 AS streams, state_bytes + journal_bytes AS bytes, 0 AS log_bytes FROM streams
    UNION ALL SELECT used.tenant, 0, length(data), 0 FROM (SELECT DISTINCT tenant, blob FROM uses) AS used
        JOIN blobs ON name = blob
    UNION ALL SELECT tenant, 0, 0, bytes FROM log_sizes JOIN streams ON number = stream
) AS counted GROUP BY tenant
"""

# Streams that lack something, and what; at most ten.
GAPS: Final = f"""
SELECT id, what FROM (
    SELECT id, 'records' AS what FROM streams WHERE finish - start <> (
        SELECT coalesce(sum(positions), 0) FROM records
        WHERE key >= (number << {POSITION_BITS}) + start AND key < (number << {POSITION_BITS}) + finish)
    UNION ALL SELECT id, 'settings' FROM streams WHERE NOT EXISTS (SELECT 1 FROM specs WHERE stream = number)
    UNION ALL SELECT id, 'prototypes' FROM streams JOIN uses ON stream = number
        WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE name = blob)
) AS gaps LIMIT 10
"""

# Leases. In SQLite they are in memory, because they end with its process.
LEASES: Final = """
CREATE TABLE leases (worker BLOB PRIMARY KEY, incarnation BLOB NOT NULL, until REAL NOT NULL);
CREATE TABLE taken (
    worker BLOB NOT NULL, stream BLOB NOT NULL, epoch INTEGER NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (worker, stream)
);
"""

SQLITE: Final = f"""{TABLES}
CREATE TABLE commits (number INTEGER NOT NULL) STRICT;
INSERT INTO commits VALUES (0);
"""
POSTGRES: Final = f"""{TABLES}{LEASES}
CREATE FUNCTION store_clock() RETURNS double precision LANGUAGE sql VOLATILE
    AS 'SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)';
CREATE FUNCTION lease_clock() RETURNS double precision LANGUAGE sql VOLATILE AS 'SELECT store_clock()';
ALTER TABLE records ALTER data SET STORAGE EXTERNAL;
ALTER TABLE records SET (toast_tuple_target = 8160);
ALTER TABLE snapshots ALTER data SET STORAGE EXTERNAL;
ALTER TABLE request_keys ALTER data SET STORAGE EXTERNAL;
ALTER TABLE saved ALTER data SET STORAGE EXTERNAL;
ALTER TABLE log_thumbnails ALTER data SET STORAGE EXTERNAL;
"""


def other_layout(place: str, layout: int) -> StoreError:
    """Return the error for a store with the tables of another layout."""
    return StoreError(
        f"{place} was written by another version of protodcs: it has layout {layout}, and this one reads {LAYOUT}. "
        "Nothing is lost. Use the version of protodcs that wrote it"
    )


_TYPES: Final = {
    "AUTOINCREMENT": "GENERATED ALWAYS AS IDENTITY",
    "INTEGER": "bigint",
    "BLOB": "bytea",
    "REAL": "double precision",
    "ANY": "bytea",
    "x''": "''",
}


def for_postgres(statements: str) -> str:
    """Return statements that create tables in the words of PostgreSQL."""
    statements = re.sub(r"\) STRICT(, WITHOUT ROWID)?", ")", statements)
    statements = re.sub(r"/\*\+ (.*?) \*/", r"\1", statements)
    return re.sub(r"\b(AUTOINCREMENT|INTEGER|BLOB|REAL|ANY)\b|x''", lambda found: _TYPES[found[0]], statements)


@cache
def query_for_postgres(statement: str) -> str:
    """Return a query in the words of PostgreSQL: other names of parameters, and no hints for indexes."""
    numbers = iter(range(1, 1000))
    statement = re.sub(r"/\*\+ (.*?) \*/", r"\1", statement)
    statement = re.sub(r" INDEXED BY \w+", "", statement)
    return re.sub(r"\?(\d*)", lambda found: f"${found[1] or next(numbers)}", statement)
