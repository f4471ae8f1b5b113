"""Arrays files: an HDF5 image built in memory, written once, and read only after everything it links to is checked.

Layout of one file: ``/description``, the UTF-8 bytes of a JSON object, and one dataset ``/arrays/KEY`` for each entry
of its ``arrays``. Datasets are chunked with the fletcher32 filter and no other, in the types of ``dtypes.STORED``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import msgspec
import numpy as np
from msgspec import Meta

from .dtypes import STORED, Array, Plain, decoded
from .errors import EvidenceError
from .jsonio import decode_object, encode, present
from .limits import MAX_ARRAYS_BYTES, MAX_DATASETS, MAX_DIMENSIONS, MAX_INT64, MAX_MANIFEST_BYTES, MIB
from .storage import open_inside

_KEY = re.compile(r"[A-Za-z0-9_]{1,200}")
#: Small enough to stay in the processor's cache while its checksum is made.
_CHUNK_BYTES = MIB // 2
#: Arrays of this size together are read with the first one that is asked for: to open a file costs more than that.
_SMALL_BYTES = MIB // 4
_images = itertools.count()

Size = Annotated[int, Meta(ge=0, le=MAX_INT64)]


class ArrayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the description says of one array; ``stride`` in elements, of the array as it was in the job."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    stride: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMENSIONS)] | None = None
    device: str | None = None


class Description(msgspec.Struct, kw_only=True):
    """The description of one arrays file, which is also its line in ``arrays.jsonl``."""

    kind: str
    step: Size
    micro: Size | None = None
    order: Size | None = None
    name: str | None = None
    attributes: dict[str, Any] = {}
    arrays: dict[str, ArrayInfo] = {}
    file: str | None = None
    bytes: Size | None = None
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{8}$")] | None = None


def array_info(plain: Plain) -> ArrayInfo:
    """The description of an array about to be stored."""
    return ArrayInfo(dtype=plain.dtype, shape=plain.shape, stride=plain.stride, device=plain.device)


def build_image(description: Description, arrays: dict[str, Plain]) -> bytes:
    """The bytes of an arrays file.

    Raises:
        EvidenceError: an array is larger than the limit, or its key is no plain word.
    """
    import h5py

    total = sum(each.data.nbytes for each in arrays.values())
    if total > MAX_ARRAYS_BYTES - MIB:
        raise EvidenceError(
            f"{total:,} bytes of arrays are more than {MAX_ARRAYS_BYTES - MIB:,}", str(description.name)
        )
    # A name of its own: HDF5 takes two files of one name for the same, also where neither is ever on a disk.
    with h5py.File(f"image-{next(_images)}", "w", driver="core", backing_store=False) as file:
        group = file.create_group("arrays")
        _store(file, "description", np.frombuffer(encode(description), np.uint8))
        for key, plain in arrays.items():
            if not _KEY.fullmatch(key):
                raise EvidenceError(f"array key {key!r:.60} is not made of letters, digits and underscores")
            if plain.data.size:  # an empty array is described and not stored
                _store(group, key, plain.data)
        file.flush()
        return file.id.get_file_image()


def _store(group: Any, name: str, data: Array) -> None:
    data = np.ascontiguousarray(data).reshape(data.shape or (1,))  # a chunked dataset has at least one dimension
    group.create_dataset(name, data=data, chunks=_chunks(data.shape, data.itemsize), fletcher32=True)


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole rows, as many as fit half a MiB; of a row that is larger, parts of it."""
    chunks = list(shape)
    for axis in range(len(shape)):
        rest = itemsize * math.prod(shape[axis + 1 :])
        chunks[axis] = max(1, min(shape[axis], _CHUNK_BYTES // rest))
        if rest <= _CHUNK_BYTES:
            break
        chunks[axis] = 1
    return tuple(chunks)


def parse_description(raw: dict[str, Any], where: str = "") -> Description:
    """Validate the description of an arrays file.

    Raises:
        EvidenceError: a wrong type, an unknown dtype or an impossible shape.
    """
    try:
        description = msgspec.convert(present(raw), Description)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise EvidenceError(f"description of an arrays file: {error}", where) from None
    if len(description.arrays) > MAX_DATASETS:
        raise EvidenceError(f"{len(description.arrays):,} arrays are more than {MAX_DATASETS:,}", where, "refused")
    for key, info in description.arrays.items():
        if not _KEY.fullmatch(key) or info.dtype not in STORED:
            raise EvidenceError(f"array {key!r:.60} of dtype {info.dtype!r:.40} is none of this format", where)
        if math.prod(info.shape) * STORED[info.dtype].itemsize > MAX_ARRAYS_BYTES and info.dtype != "string":
            shape = "×".join(f"{each:,}" for each in info.shape)
            raise EvidenceError(f"array {key} of {shape} elements is beyond the size limit", where, "refused")
    return description


class ArraysFile:
    """One arrays file of a capsule. Opening it checks size, checksum and everything HDF5 would follow."""

    def __init__(self, root: Path, relative: str, description: Description | None) -> None:
        self.root = root
        self.relative = relative
        self.description = description
        self.checked = False
        self._sound = False  # its bytes are those that the writer wrote
        self._ahead: dict[str, Array] = {}  # read with another one, and not yet asked for

    def glance(self, room: int) -> tuple[Description, int]:
        """What the file holds, and the bytes read to find out; without opening it where its line in the index stands.

        Size and, up to ``room`` bytes, the checksum are compared; what is inside is checked when it is read.

        Raises:
            EvidenceError: see ``check``.
        """
        known = self.description
        if known is None or known.bytes is None or known.checksum is None:
            return self.check(), 0
        if known.bytes <= room:
            self._check_bytes(whole=True)
            return known, known.bytes
        self._check_bytes(whole=False)
        return known, 0

    def check(self) -> Description:
        """Check the file as far as is possible without reading its arrays, and return its description.

        Raises:
            EvidenceError: the file is missing, cut, changed, or holds what is refused.
        """
        if not self.checked:
            self._check_bytes(whole=True)
            with self._opened() as file:
                self._check_inside(file)
        assert self.description is not None
        return self.description

    def _check_inside(self, file: Any) -> Description:
        if self.description is None:
            raw = decode_object(_dataset(file, "description", None, MAX_MANIFEST_BYTES)[...].tobytes())
            self.description = parse_description(raw, self.relative)
        if not self.checked:
            for key, info in self.description.arrays.items():
                _expected(file, key, info, self.relative)
            self.checked = True
        return self.description

    def read(self, key: str) -> Array:
        """The stored bits of one array, in the shape of its description.

        Raises:
            EvidenceError: see ``check``; or a chunk fails its checksum, or text is none.
        """
        if key in self._ahead:
            return self._ahead.pop(key)
        self._check_bytes(whole=True)
        with self._opened() as file:
            arrays = self._check_inside(file).arrays
            bits = self._bits(file, key, arrays[key])
            plain = {other: info for other, info in arrays.items() if info.dtype != "string"}
            if sum(math.prod(each.shape) * STORED[each.dtype].itemsize for each in plain.values()) <= _SMALL_BYTES:
                for other in plain.keys() - {key}:
                    with contextlib.suppress(Exception):  # said when it is asked for
                        self._ahead[other] = self._bits(file, other, plain[other])
        return bits

    def _bits(self, file: Any, key: str, info: ArrayInfo) -> Array:
        dataset = _expected(file, key, info, self.relative)
        if dataset is None:
            return np.empty(info.shape, STORED[info.dtype])
        bits: Array = dataset[...]
        if info.dtype != "string":
            return bits.reshape(info.shape)
        try:
            decoded(bits, info.dtype, info.shape)
        except (ValueError, TypeError, EvidenceError) as error:
            raise EvidenceError(f"array {key} is no list of texts ({str(error)[:80]})", self.relative) from None
        return bits

    def _check_bytes(self, whole: bool) -> None:
        if self._sound:
            return
        try:
            descriptor = open_inside(self.root, self.relative)
        except FileNotFoundError:
            raise EvidenceError("arrays file is missing", self.relative) from None
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_ARRAYS_BYTES:
                raise EvidenceError(f"file of {size:,} bytes is larger than {MAX_ARRAYS_BYTES:,}", self.relative)
            known = self.description
            if known and known.bytes is not None and size != known.bytes:
                raise EvidenceError(f"arrays file is cut: {size:,} of {known.bytes:,} bytes", self.relative)
            if known and known.checksum is not None and whole:
                checksum = 0
                while chunk := file.read(1 << 22):
                    checksum = crc32(chunk, checksum)
                if f"{checksum:08x}" != known.checksum:
                    raise EvidenceError("arrays file differs from its checksum", self.relative, "it was not opened")
            self._sound = whole

    def _opened(self) -> _Opened:
        return _Opened(self.root / self.relative, self.relative)


class _Opened:
    """An HDF5 file opened for reading; every error of the library inside becomes an EvidenceError."""

    def __init__(self, path: Path, where: str) -> None:
        self._path, self._where = path, where
        self._file: Any = None

    def __enter__(self) -> Any:
        import h5py

        try:
            self._file = h5py.File(self._path, "r", locking=False)
        except Exception as error:
            raise self._refusal(error) from None
        return self._file

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            self._file.close()
        except Exception as closing:
            error = error or closing
        if isinstance(error, Exception) and not isinstance(error, EvidenceError):
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> EvidenceError:
        return EvidenceError(f"HDF5 cannot read it ({type(error).__name__}: {str(error)[:120]})", self._where)


def _expected(file: Any, key: str, info: ArrayInfo, where: str) -> Any:
    """The dataset of an array after all checks; None for an empty array, which is not stored."""
    stored = STORED[info.dtype]
    shape = info.shape or (1,)
    if info.dtype != "string" and math.prod(shape) == 0:
        return None
    dataset = _dataset(file, f"arrays/{key}", stored, MAX_ARRAYS_BYTES)
    if info.dtype != "string" and dataset.shape != shape:
        raise EvidenceError(f"array {key} has shape {dataset.shape} and its description says {shape}", where)
    return dataset


def _dataset(file: Any, path: str, dtype: np.dtype[Any] | None, limit: int) -> Any:
    """A dataset that lies wholly in this file, is no larger than it, and uses no filter but fletcher32."""
    import h5py
    import h5py.h5l as h5l

    where = os.path.basename(file.filename)
    group = file
    for part in path.split("/"):
        if part.encode() not in group.id:
            raise EvidenceError(f"array {path} is missing", where)
        link = group.id.links.get_info(part.encode()).type
        if link != h5l.TYPE_HARD:
            kind = {h5l.TYPE_SOFT: "soft", h5l.TYPE_EXTERNAL: "external"}.get(link, "user-defined")
            raise EvidenceError(f"{path} is reached through a link of kind {kind}", where, "refused")
        group = group[part]
    dataset = group
    if not isinstance(dataset, h5py.Dataset):
        raise EvidenceError(f"{path} is no dataset", where, "refused")
    plist = dataset.id.get_create_plist()
    if plist.get_external_count():
        raise EvidenceError(f"{path} keeps its data outside the file", where, "refused")
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise EvidenceError(f"{path} is a virtual dataset", where, "refused")
    filters = [plist.get_filter(at)[0] for at in range(plist.get_nfilters())]
    if any(each != h5py.h5z.FILTER_FLETCHER32 for each in filters):
        raise EvidenceError(f"{path} uses a filter other than fletcher32", where, "refused")
    if dataset.shape is None or len(dataset.shape) > MAX_DIMENSIONS or dataset.dtype.kind not in "iuf":
        raise EvidenceError(f"{path} has shape {dataset.shape} and dtype {dataset.dtype}", where, "refused")
    chunk = plist.get_chunk() if plist.get_layout() == h5py.h5d.CHUNKED else ()
    size = max(math.prod(dataset.shape), math.prod(chunk)) * dataset.dtype.itemsize
    if size > limit or size > file.id.get_filesize():  # nothing is compressed, so data cannot exceed the file
        raise EvidenceError(f"{path} announces {size:,} bytes, more than the file holds", where, "refused")
    if dtype is not None and dataset.dtype != dtype:
        raise EvidenceError(f"{path} has dtype {dataset.dtype}, expected {dtype}", where)
    return dataset
