"""Codecs alone: what is written is read, within the error that each promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.hooks.codecs import Codec, Fp8Codec, Int8Codec, SignCodec
from paceline.hooks.topk import largest
from tests.examples import examples

CODECS: dict[str, Codec] = {
    "int8": Int8Codec(16),
    "e4m3": Fp8Codec(16, "e4m3"),
    "e5m2": Fp8Codec(16, "e5m2"),
    "sign": SignCodec(16),
}


def round_trip(codec: Codec, values: torch.Tensor, **options: object) -> torch.Tensor:
    wire = torch.zeros(
        len(values), codec.row_bytes(values.shape[1], values.dtype), dtype=torch.uint8
    )
    codec.encode(values.clone(), wire, **options)  # type: ignore[arg-type]
    out = torch.empty_like(values)
    codec.decode(wire, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp8_is_torchs(dtype: torch.dtype) -> None:
    """Our own reading of e4m3 gives what torch's cast gives, for every code but NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    for name in ("e4m3", "e5m2"):
        codec = CODECS[name]
        assert isinstance(codec, Fp8Codec)
        expected = codes.view(codec.dtype).to(dtype)
        finite = torch.isfinite(expected)
        out = torch.empty(16, 16, dtype=dtype)
        codec.read(codes.view(16, 16), torch.full((16,), 3.0, dtype=dtype), out)
        assert torch.equal(out.view(-1)[finite], 3.0 * expected[finite])


def test_sign_packs_every_pattern() -> None:
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    values = (bits * 2.0 - 1.0).view(1, -1)
    assert torch.equal(round_trip(SignCodec(8), values), values)


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["int8", "e4m3", "e5m2"]),
    st.lists(st.floats(-1e30, 1e30), min_size=16, max_size=16),
)
def test_error_is_within_what_is_promised(name: str, numbers: list[float]) -> None:
    values = torch.tensor([numbers], dtype=torch.float64)
    out = round_trip(CODECS[name], values)
    top = values.abs().max()
    allowed = {
        "int8": top / 254,
        "e4m3": values.abs() / 16 + top * 2**-10 / 448,
        "e5m2": values.abs() / 8 + top * 2**-17 / 57344,
    }[name]
    assert ((out - values).abs() <= allowed * (1 + 1e-9) + 1e-300).all()


def test_keep_error_and_add() -> None:
    for name, codec in CODECS.items():
        values = torch.randn(2, 64)
        extra = torch.randn(100)  # shorter: what is behind it is padding
        expected = values.clone()
        expected.view(-1)[:100] += extra
        wire = torch.zeros(2, codec.row_bytes(64, torch.float32), dtype=torch.uint8)
        codec.encode(values, wire, add=extra, keep_error=True)
        out = torch.empty(2, 64)
        codec.decode(wire, out)
        torch.testing.assert_close(out + values, expected, msg=name)


def test_stochastic_rounding_is_right_on_average() -> None:
    codec = Int8Codec(16, stochastic=True)
    values = torch.full((1, 16), 0.3)
    values[0, 0] = 127.0
    noise = torch.Generator().manual_seed(0)
    mean = torch.stack([round_trip(codec, values, noise=noise) for _ in range(2000)]).mean(dim=0)
    torch.testing.assert_close(mean, values, rtol=0.0, atol=0.05)
    assert round_trip(Int8Codec(16), values)[0, 1] == 0.0


@settings(max_examples=examples(30))
@given(st.integers(1, 60_000), st.integers(1, 500), st.integers(0, 3))
def test_largest_is_exact(numel: int, k: int, seed: int) -> None:
    k = min(k, numel)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    found = values[largest(values, k)].abs().sort().values
    expected = values.abs().topk(k).values.sort().values
    assert torch.equal(found, expected)


def test_largest_with_many_equal_values() -> None:
    values = torch.ones(50_000)
    assert len(largest(values, 7)) == 7
    values[1234] = float("nan")
    assert 1234 in largest(values, 7)
