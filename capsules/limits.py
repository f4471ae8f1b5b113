"""Sizes beyond which evidence is refused, so that reading a capsule takes bounded memory and time.

They are limits of this reader, not of the format; ``README.md`` lists them.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: Nesting of any JSON value.
MAX_JSON_DEPTH = 64
#: ``capsule.json`` and ``rank.json``.
MAX_MANIFEST_BYTES = 16 * MIB
#: One line of a record stream, of ``names.jsonl`` or of ``arrays.jsonl``.
MAX_LINE_BYTES = 16 * MIB
#: Bytes and lines of one JSON-lines file; of a longer one the newest part is read.
MAX_LINES_BYTES = 256 * MIB
MAX_LINES = 2_000_000
#: Records that one line of columns may stand for.
MAX_COLUMN_RECORDS = 65_536
#: Damaged lines after which the rest of a file is not read: it is no such file.
MAX_BAD_LINES = 20_000
#: ``scalars.bin`` and ``stats.bin`` of all ranks together; of longer ones the newest part is read, an equal share
#: a rank.
MAX_SCALARS_BYTES = 1 * GIB
MAX_STATS_BYTES = 512 * MIB
#: Payload of one block of a packed table.
MAX_BLOCK_BYTES = 1 * MIB
#: One arrays file, and so one array.
MAX_ARRAYS_BYTES = 2 * GIB
#: Arrays files of one rank whose checksum is compared when they are listed; that of the others when they are loaded.
MAX_GLANCED_BYTES = 1 * GIB
#: Datasets in one arrays file, and dimensions of one array.
MAX_DATASETS = 4096
MAX_DIMENSIONS = 32
#: Bytes whose SHA-256 is taken while looking at a capsule, and when its digest is asked for (sparse files announce
#: terabytes and hold nothing); to open a file counts as so many bytes.
MAX_HASHED_AT_A_GLANCE = 2 * GIB
MAX_DIGEST_BYTES = 1024 * GIB
HASHED_PER_FILE = 64 * KIB
#: Record streams of one rank; this program knows some thirty.
MAX_STREAMS = 1024
#: Ranks of one capsule.
MAX_RANKS = 16_384
#: Damage entries listed one by one for a single file; further ones are counted.
MAX_DAMAGE_ROWS = 20
#: Damage entries listed of one capsule; further ones are counted.
MAX_ALL_DAMAGE_ROWS = 1000

MAX_INT64 = 2**63 - 1
