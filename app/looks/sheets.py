"""The typed answers of the looks at layers and batches; the screen imports these, and nothing heavy with them."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["forward", "backward", "parameters", "updates"]


class BadTensor(msgspec.Struct, frozen=True, kw_only=True):
    """The first tensor of the capsule that holds NaN or Inf unlawfully, and the sheet it is on."""

    kind: Kind
    step: int
    rank: int
    micro: int
    name: str


class LayerSheet(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the tensors of one step, in the order of execution; lists have one entry a tensor.

    Attributes:
        step: the recorded step nearest to the one asked for; None where nothing of this kind was recorded.
        position: place of ``step`` among the ``steps`` recorded ones, from 0.
        full: whether any row has more than its norm.
        full_before: nearest earlier step with full statistics; ``full_after`` the nearest later one.
        total: rows of this step; more than are here where there are very many.
        absmax: of the finite elements; NaN, as in every list of floats, is "not measured".
        rms_before: rms of the same tensor at the recorded step before.
        zeros: share of elements that are zero; ``subnormals`` likewise.
        nan: count, −1 where not counted; ``posinf`` and ``neginf`` likewise.
        room: log2(largest number of the dtype / absmax), in binades; from the rms where there is no absmax.
        level: 0 (far from both ends) to 4 (within a factor of 2 of the largest), −1 below the smallest normal
            number, −2 all zero, −3 dtype or size unknown.
        bad: rows that hold NaN or Inf where none should be.
    """

    kind: Kind
    step: int | None
    rank: int = 0
    ranks: tuple[int, ...] = ()
    micro: int = 0
    micros: tuple[int, ...] = ()
    steps: int = 0
    position: int = 0
    full: bool = False
    full_before: int | None = None
    full_after: int | None = None
    total: int = 0
    first_bad: BadTensor | None = None
    name: list[str] = []
    role: list[str] = []
    dtype: list[str] = []
    shape: list[str] = []
    numel: list[int] = []
    absmax: list[float] = []
    rms: list[float] = []
    rms_before: list[float] = []
    min: list[float] = []
    max: list[float] = []
    mean: list[float] = []
    std: list[float] = []
    zeros: list[float] = []
    subnormals: list[float] = []
    nan: list[int] = []
    posinf: list[int] = []
    neginf: list[int] = []
    room: list[float] = []
    level: list[int] = []
    bad: list[int] = []


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one sample from ``BatchSheet.left`` on; each list has one entry a token, or none where not captured.

    Attributes:
        row: row of the batch.
        id: the sample's id, else its row.
        length: tokens that are not padding.
        supervised: tokens that the labels ask for; ``mean`` their mean loss in nats.
        label: text of the label that belongs to the token, empty where it is ignored or there is none.
        loss: nats paid for the token (at the position before it); NaN where not known.
        asked: whether the labels ask for it.
        fault: text of the token on which the fault scores the position before this one, empty where it does not.
        fault_loss: nats the fault pays there, -Inf where it scores nothing.
        added: 1 where only the fault scores, 2 where only the fault's denominator counts, 0 elsewhere.
    """

    row: int
    id: str
    length: int
    supervised: int
    mean: float
    token: list[str]
    label: list[str] = []
    mask: list[int] = []
    role: list[int] = []
    loss: list[float] = []
    asked: list[bool] = []
    fault: list[str] = []
    fault_loss: list[float] = []
    added: list[int] = []


class WorstToken(msgspec.Struct, frozen=True, kw_only=True):
    """A supervised token of the batch, by loss: ``place`` 0 is the worst."""

    place: int
    row: int
    token: int
    text: str
    loss: float


class BatchSheet(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one captured micro-batch, aligned by token.

    Attributes:
        step: the captured step nearest to the one asked for; None where no batch was captured.
        position: place among the ``batches`` captured ones, from 0.
        layout: unshifted (a label stands at its own token), shifted (at the position before), or empty: neither
            fits, and everything stands at its own position.
        rows: samples of the batch; ``tokens`` columns of it.
        loss_from: where the losses come from.
        bytes: whether the vocabulary is bytes, so that tokens are characters.
        mask_note: what the attention mask says where it needs no line of its own, empty where it has one.
        roles: the roles that occur.
        loud: nats from which a loss stands far above the batch's mean.
        fault: what the fault does to the count, in words.
    """

    step: int | None
    rank: int = 0
    micro: int = 0
    position: int = 0
    batches: int = 0
    split: str = ""
    reported: float | None = None
    layout: str = ""
    rows: int = 0
    tokens: int = 0
    top: int = 0
    left: int = 0
    loss_from: str = ""
    bytes: bool = False
    mask_note: str = ""
    roles: list[int] = []
    mean: float = 0.0
    loud: float = 0.0
    fault: str = ""
    worst: WorstToken | None = None
    samples: tuple[TokenRow, ...] = ()
