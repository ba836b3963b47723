"""Frequencies of rotary positions, plain and scaled to sequences longer than those first trained on.

The kinds of scaling and their keys are those of Hugging Face's ``rope_scaling``. D is the number of dimensions that are
turned; pair i of D/2 turns by ``theta^(-2i/D)`` radians a token (arXiv 2104.09864) before it is scaled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from engine.errors import UserError
from engine.schema import Schema, parse
from engine.spec import ModelSpec, NonNegative, Positive

Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Original = Annotated[int, Field(ge=2)]
Factors = Annotated[tuple[Positive, ...], Field(strict=False)]
Frequencies = NDArray[np.float64]


@dataclass(frozen=True)
class Rotation:
    """How the dimensions of a head turn."""

    frequencies: Frequencies
    """Radians a token of each pair of dimensions, [D/2]."""
    amplitude: float = 1.0
    """Factor on cosine and sine, and so on turned queries and keys."""


class _Scaling(Schema, ABC):
    """One kind of scaling; the fields are its keys."""

    @abstractmethod
    def rotation(self, spec: ModelSpec, length: int) -> Rotation:
        """Of sequences of ``length`` tokens."""

    def softmax_factor(self) -> float:
        """Factor on the logits of latent attention."""
        return 1.0


class _Linear(_Scaling):
    """All positions divided by a factor (arXiv 2306.15595)."""

    factor: Factor

    def rotation(self, spec: ModelSpec, length: int) -> Rotation:
        return Rotation(_plain(spec) / self.factor)


class _Dynamic(_Scaling):
    """NTK-aware base that grows with the sequence beyond ``max_positions`` tokens, and is plain up to there. The length
    is that of the sequences at hand, so runs at one ``sequence_length`` always turn alike."""

    factor: Factor

    def rotation(self, spec: ModelSpec, length: int) -> Rotation:
        dim = rotary_dim(spec)
        stretch = self.factor * max(length / spec.max_positions, 1.0) - (self.factor - 1)
        return Rotation(_plain(spec, spec.rope_theta * stretch ** (dim / max(dim - 2, 1))))


class _Llama3(_Scaling):
    """Slow pairs divided by a factor, fast ones left, those between mixed (Llama 3.1, arXiv 2407.21783)."""

    factor: Factor
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Original | None = None

    def rotation(self, spec: ModelSpec, length: int) -> Rotation:
        plain = _plain(spec)
        turns = (self.original_max_position_embeddings or spec.max_positions) * plain / (2 * math.pi)
        if self.low_freq_factor == self.high_freq_factor:
            kept = (turns >= self.high_freq_factor).astype(np.float64)
        else:
            kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return Rotation(plain * (kept + (1 - kept) / self.factor))


class _Yarn(_Scaling):
    """YaRN (arXiv 2309.00071): pairs that turn less than ``beta_slow`` times within the original length divided by the
    factor, those that turn more than ``beta_fast`` times left, a linear ramp over the pairs between; logits sharper."""

    factor: Factor
    original_max_position_embeddings: Original | None = None
    attention_factor: NonNegative | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: NonNegative | None = None
    mscale_all_dim: NonNegative | None = None
    truncate: bool = True

    def rotation(self, spec: ModelSpec, length: int) -> Rotation:
        plain = _plain(spec)
        first = self._pair_that_turns(self.beta_fast or 32, spec)
        last = self._pair_that_turns(self.beta_slow or 1, spec)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim(spec) - 1)
        width = (last - first) or 0.001  # as in the reference: a step where the ramp has no width
        slow = np.clip((np.arange(len(plain)) - first) / width, 0, 1)
        return Rotation(plain * (1 - slow + slow / self.factor), self._amplitude())

    def _pair_that_turns(self, times: float, spec: ModelSpec) -> float:
        """The pair, as a fraction, that turns so many times within the original length."""
        original = self.original_max_position_embeddings or spec.max_positions
        return rotary_dim(spec) * math.log(original / (times * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    def _amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    def _sharper(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def softmax_factor(self) -> float:
        return self._sharper(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


class _LongRope(_Scaling):
    """A factor for each pair (arXiv 2402.13753), one list of them up to the original length and one beyond it."""

    short_factor: Factors
    long_factor: Factors
    factor: Factor | None = None
    original_max_position_embeddings: Original | None = None
    attention_factor: NonNegative | None = None

    def rotation(self, spec: ModelSpec, length: int) -> Rotation:
        original = max(self.original_max_position_embeddings or spec.max_positions, 2)
        factors = np.array(self.long_factor if length > original else self.short_factor)
        amplitude = self.attention_factor
        if amplitude is None:
            factor = max(self.factor or spec.max_positions / original, 1.0)
            amplitude = math.sqrt(1 + math.log(factor) / math.log(original))
        return Rotation(_plain(spec) / factors, amplitude)


_KINDS: dict[str, type[_Scaling]] = {
    "linear": _Linear,
    "dynamic": _Dynamic,
    "llama3": _Llama3,
    "yarn": _Yarn,
    "longrope": _LongRope,
}


def rotary_dim(spec: ModelSpec) -> int:
    """Dimensions of each head that are turned."""
    return spec.latent_attention.rope_head_dim if spec.latent_attention else spec.head_dim


def rotation(spec: ModelSpec, length: int) -> Rotation:
    """How the heads of ``spec`` turn in whole sequences of ``length`` tokens (some kinds depend on it).

    Raises:
        UserError: As ``scaling_of``.
    """
    scaling = scaling_of(spec)
    return Rotation(_plain(spec)) if scaling is None else scaling.rotation(spec, length)


def softmax_factor(spec: ModelSpec) -> float:
    """Factor on the logits of latent attention beside 1/sqrt(D): yarn's with ``mscale_all_dim`` (DeepSeek-V3,
    arXiv 2412.19437).

    Raises:
        UserError: As ``scaling_of``.
    """
    scaling = scaling_of(spec)
    return 1.0 if scaling is None else scaling.softmax_factor()


def scaling_of(spec: ModelSpec) -> _Scaling | None:
    """The scaling that ``spec.rope_scaling`` describes; None for plain rotary positions.

    Raises:
        UserError: A kind that isn't known, or keys that are missing, unknown or out of range.
    """
    if spec.rope_scaling is None or spec.positions != "rope":
        return None
    settings = dict(spec.rope_scaling)
    named = [settings.pop(key) for key in ("rope_type", "type") if key in settings]
    kind: Any = named[0] if named else None
    if kind not in _KINDS:
        raise UserError(
            f"rope_scaling of the kind {kind!r}",
            hint=f"set model.rope_scaling.rope_type to one of {', '.join(_KINDS)}, or model.rope_scaling to null",
        )
    if settings.get("partial_rotary_factor") == 1:
        del settings["partial_rotary_factor"]
    scaling = parse(_KINDS[kind], settings, path=("rope_scaling",))
    if isinstance(scaling, _Yarn) and spec.rope_theta <= 1:
        raise UserError(
            f"rope_scaling of the kind yarn with rope_theta {spec.rope_theta:g}",
            hint="set model.rope_theta above 1: models with it have 10000 or more",
        )
    pairs = rotary_dim(spec) // 2
    if isinstance(scaling, _LongRope) and {len(scaling.short_factor), len(scaling.long_factor)} != {pairs}:
        raise UserError(
            f"rope_scaling of the kind longrope with {len(scaling.short_factor)} short and {len(scaling.long_factor)}"
            f" long factors for heads that turn {2 * pairs} dimensions",
            hint=f"give {pairs} of each in model.rope_scaling.short_factor and long_factor",
        )
    return scaling


def _plain(spec: ModelSpec, theta: float | None = None) -> Frequencies:
    dim = rotary_dim(spec)
    return (theta or spec.rope_theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
