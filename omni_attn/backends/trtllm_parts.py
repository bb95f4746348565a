"""What a step of TRTLLM_ATTN is made of: parts of the batch that one kernel call serves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.trtllm_kernels import Quantisation
from omni_attn.errors import MetadataError
from omni_attn.ops.segments import Segment

if TYPE_CHECKING:
    from omni_attn.calibration import LayerCalibration
    from omni_attn.config.blocks import SkipSoftmaxSpec

_log = logging.getLogger("omni_attn")
_logged: set[str] = set()


@dataclass(frozen=True)
class Part:
    """Query rows that attend to keys in one kernel call.

    Attributes:
        rows, keys: (start, end) along the sequences.
        item: the item of the batch, None = every one.
        q_lens, k_lens: tokens of the sequences that lie behind one another in it; empty = one sequence per item.
        factor: skip-softmax factor, None = the ordinary kernel.
        quant: how it is quantised, None = not.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    item: int | None = None
    q_lens: tuple[int, ...] = ()
    k_lens: tuple[int, ...] = ()
    factor: float | None = None
    quant: Quantisation | None = None


@dataclass(frozen=True)
class SkipRule:
    """What a step skips.

    Attributes:
        threshold: weight below which a tile is skipped, whatever the length.
        factor: the kernels' own number, which they divide by the length.
        dense: why nothing is skipped although a person asked for it.
    """

    threshold: float | None = None
    factor: float | None = None
    dense: str | None = None

    def for_keys(self, keys: int) -> float | None:
        """The factor of a call over so many key tokens."""
        return self.factor if self.threshold is None else self.threshold * keys


def skip_rule(
    skip: SkipSoftmaxSpec | None, calibration: LayerCalibration | None, record: AttentionMetadata
) -> SkipRule:
    """What a spec means in the step that a record stands for.

    Raises:
        MetadataError: a target sparsity without the calibration that translates it.
    """
    if skip is None or skip.threshold == 0:
        return SkipRule()
    if skip.target_sparsity is not None and calibration is None:
        raise MetadataError(
            f"TRTLLM_ATTN: skip_softmax.target_sparsity={skip.target_sparsity} needs the calibration of a checkpoint, "
            "found none: hand it over with attention.calibrate(SkipSoftmaxCurve(a, b)), which omni_attn.calibration "
            "has, or give skip_softmax.threshold"
        )
    if calibration == "dense" and skip.target_sparsity is not None:
        return SkipRule(dense="calibration")
    gate, sigma = skip.disabled_until_timestep, record.sigma
    if gate and sigma is None:
        _warn_once(
            "TRTLLM_ATTN: skip_softmax.disabled_until_timestep is set and no sigma is published, so every step stays "
            "dense; let the loop state it with record.at_step(step, sigma=...), or set it to 0"
        )
        return SkipRule(dense="no sigma for the timestep gate")
    if gate and sigma is not None and sigma > gate:
        return SkipRule(dense="timestep gate")
    if skip.threshold is not None:
        return SkipRule(threshold=skip.threshold)
    assert skip.target_sparsity is not None and calibration is not None and calibration != "dense"
    return SkipRule(factor=calibration.factor(skip.target_sparsity))


def _warn_once(text: str) -> None:
    if not torch.compiler.is_compiling() and text not in _logged:  # no trace holds a log line
        _logged.add(text)
        _log.warning(text)


def split(part: Part, rule: SkipRule, quant: Quantisation | None) -> Part:
    """A part that holds one sequence, or equal ones, with what its lengths decide."""
    queries, keys = part.rows[1] - part.rows[0], part.keys[1] - part.keys[0]
    fits = quant is not None and queries >= quant.q_block and keys >= quant.k_block
    return replace(part, factor=rule.for_keys(keys), quant=quant if fits else None)


def document_parts(
    documents: Iterable[Segment], rule: SkipRule, quant: Quantisation | None
) -> tuple[Part, ...]:
    """Packed documents as few calls: neighbours that need the same kernel run together; empty ones are left out.

    A threshold is the same share of every softmax, and kernels divide a factor by each sequence's own length: with one,
    only documents of equally many keys run together.
    """
    single = (
        split(Part((d.query_start, d.query_end), (d.key_start, d.key_end)), rule, quant)
        for d in documents
        if d.query_end > d.query_start and d.key_end > d.key_start
    )
    return tuple(_joined(single))


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    run: Part | None = None
    for part in parts:
        lens = (part.rows[1] - part.rows[0],), (part.keys[1] - part.keys[0],)
        adjoins = run is not None and (run.rows[1], run.keys[1]) == (part.rows[0], part.keys[0])
        if run is not None and adjoins and (run.factor, run.quant) == (part.factor, part.quant):
            run = replace(
                run,
                rows=(run.rows[0], part.rows[1]),
                keys=(run.keys[0], part.keys[1]),
                q_lens=run.q_lens + lens[0],
                k_lens=run.k_lens + lens[1],
            )
            continue
        if run is not None:
            yield run
        run = replace(part, q_lens=lens[0], k_lens=lens[1])
    if run is not None:
        yield run


def describe(parts: Iterable[Part], rule: SkipRule, quant: Quantisation | None) -> str | None:
    """What the parts run, for reports; None for the ordinary kernel that was asked for."""
    parts = tuple(parts)
    words = [
        f"skip-softmax factor {factor:.6g}" for factor in dict.fromkeys(p.factor for p in parts) if factor
    ]
    if rule.dense is not None:
        words.append(f"dense: {rule.dense}")
    if quant is not None:
        short = sum(part.quant is None for part in parts)
        if short < len(parts):
            words.append(f"quantised {quant.dtype}")
        if short:
            words.append("dense: shorter than a quantisation block")
    return ", ".join(words) or None
