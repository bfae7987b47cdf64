"""Mixtures of experts in Triton, against float64: any spread of tokens over experts, every tile, odd sizes; and a
token's bits whatever tokens are beside it."""

from __future__ import annotations

import pytest
import torch

from interpreter import DEVICE, multiply_rows_alike

pytest.importorskip("triton")

from pagemill.ops import triton_experts
from pagemill.ops.torch_ops import TorchLinear, TorchQuantizedLinear
from pagemill.ops.triton_experts import ExpertTile, apply_experts, expert_tile, most_likely, stack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, in the interpreter
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
HIDDEN, SIZE = 72, 40


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts small sizes into several tiles; the interpreter takes little longer for larger ones."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_experts, "expert_tile", lambda *_: ExpertTile(16, 32, 64, 4, 1))


class Mixture:
    def __init__(self, experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.gate_up = self.draw(experts, 2 * SIZE, HIDDEN) * 0.2
        self.down = self.draw(experts, HIDDEN, SIZE) * 0.2

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype).to(DEVICE)

    def run(self, x: torch.Tensor, logits: torch.Tensor, chosen: int, **options: object) -> torch.Tensor:
        settings = {"activation": "silu", "matrix_units": self.dtype != torch.float32, **options}
        routing = most_likely(logits, chosen, normalize=settings.pop("normalize", True))
        return apply_experts(x, routing, self.gate_up, self.down, **settings)

    def expected(
        self, x: torch.Tensor, logits: torch.Tensor, chosen: int, normalize: bool = True, activation: str = "silu"
    ) -> torch.Tensor:
        shares, experts = torch.softmax(logits.double(), -1).topk(chosen, -1)
        if normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(len(x)):
            for share, expert in zip(shares[token], experts[token], strict=True):
                gate, up = (self.gate_up[expert].double() @ x[token].double()).chunk(2)
                active = torch.sigmoid(gate) * gate
                if activation == "gelu_tanh":
                    active = torch.nn.functional.gelu(gate, approximate="tanh")
                total[token] += share * (self.down[expert].double() @ (active * up))
        return total


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.isfinite().all()
    assert (got.double() - expected).abs().max() <= ROUNDING[got.dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "normalize", "activation", "dtype"),
    [
        (1, 8, 2, True, "silu", torch.float32),
        (37, 5, 2, False, "gelu_tanh", torch.float32),
        (50, 3, 3, True, "silu", torch.bfloat16),
        (5, 20, 8, False, "silu", torch.float16),
    ],
)
def test_experts(tokens: int, experts: int, chosen: int, normalize: bool, activation: str, dtype: torch.dtype) -> None:
    mixture = Mixture(experts, dtype)
    x, logits = mixture.draw(tokens, HIDDEN), 2 * mixture.draw(tokens, experts).float()
    options = {"normalize": normalize, "activation": activation}
    close(mixture.run(x, logits, chosen, **options), mixture.expected(x, logits, chosen, **options))


def test_experts_without_tokens_with_one_and_with_all() -> None:
    """Weights of experts without tokens are NaN: nothing may come of them."""
    mixture = Mixture(6)
    x, logits = mixture.draw(35, HIDDEN), mixture.draw(35, 6)
    logits[:, 3] += 20  # every token
    logits[:, (0, 5)] -= 40  # none
    logits[:, 1] -= 20
    logits[7, 1] += 60  # token 7 only
    expected = mixture.expected(x, logits, 2)
    mixture.gate_up[[0, 5]] = float("nan")
    mixture.down[[0, 5]] = float("nan")
    close(mixture.run(x, logits, 2), expected)
    assert mixture.run(x[:0], logits[:0], 2).shape == (0, HIDDEN)


def test_a_token_keeps_its_bits_whatever_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_rows_alike(monkeypatch)
    mixture = Mixture(4)
    x, logits = mixture.draw(40, HIDDEN), mixture.draw(40, 4)
    together = mixture.run(x, logits, 2)
    back = mixture.run(x.flip(0), logits.flip(0), 2).flip(0)
    assert torch.equal(back, together)
    for token in (0, 17, 39):
        at = slice(token, token + 1)
        assert torch.equal(mixture.run(x[at], logits[at], 2), together[at])


@pytest.mark.parametrize("counted", [0, 1 << 20])
def test_many_assignments_are_sorted_by_torch_and_few_by_counting(
    counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_experts, "COUNTED", counted)
    mixture = Mixture(7)
    x, logits = mixture.draw(75, HIDDEN), 3 * mixture.draw(75, 7)
    logits[:, 2] -= 100  # an expert without tokens
    close(mixture.run(x, logits, 3), mixture.expected(x, logits, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_token_only(bad: float) -> None:
    mixture = Mixture(5)
    x, logits = mixture.draw(9, HIDDEN), mixture.draw(9, 5)
    sound = mixture.run(x, logits, 2)
    logits[3], x[6] = bad, bad
    got = mixture.run(x, logits, 2)
    assert not got[3].isfinite().any()
    assert not got[6].isfinite().any()
    others = [token for token in range(9) if token not in (3, 6)]
    # The interpreter's products, which are NumPy's, differ in bits by a row's place.
    torch.testing.assert_close(got[others], sound[others], rtol=1e-5, atol=1e-5)


def test_of_equal_experts_the_first_count() -> None:
    mixture = Mixture(5)
    x, logits = mixture.draw(3, HIDDEN), torch.zeros(3, 5, device=DEVICE)
    logits[:, 3] = 1
    tilted = logits - torch.arange(5, device=DEVICE) * 1e-6
    torch.testing.assert_close(mixture.run(x, logits, 3), mixture.run(x, tilted, 3), rtol=1e-4, atol=1e-4)


def test_layers_share_what_is_stacked() -> None:
    weights = [torch.randn(6, 8) for _ in range(3)]
    linears = [TorchLinear(weight, None) for weight in weights]
    stacked = stack(linears)
    assert torch.equal(stacked, torch.stack(weights))
    assert [linear.weight.data_ptr() for linear in linears] == [part.data_ptr() for part in stacked]
    assert stack([*linears, TorchLinear(weights[0], torch.zeros(6))]) is None, "a bias"
    assert stack([*linears, TorchQuantizedLinear.__new__(TorchQuantizedLinear)]) is None


@pytest.mark.parametrize("change", ["shape", "dtype", "strides", "chosen", "logits"])
def test_what_does_not_fit_is_refused(change: str) -> None:
    mixture, chosen = Mixture(4), 2
    x, logits = mixture.draw(3, HIDDEN), mixture.draw(3, 4)
    if change == "shape":
        mixture.down = mixture.down[:, :-1]
    elif change == "dtype":
        mixture.down = mixture.down.half()
    elif change == "strides":
        x = torch.cat([x, x], 1)[:, :HIDDEN]
    elif change == "chosen":
        chosen = 5
    else:
        logits = logits.half()
    with pytest.raises(ValueError, match=r"fit each other|must be contiguous"):
        mixture.run(x, logits, chosen)


def test_tiles_are_products_that_the_gpu_has() -> None:
    for rows in (1, 16, 17, 64, 65, 5000):
        for gated in (False, True):
            for matrix_units in (False, True):
                tile = expert_tile(rows, gated, matrix_units)
                for size in (tile.rows, tile.outputs, tile.inputs):
                    assert size >= 16
                    assert size & (size - 1) == 0
