"""While a step is traced the CPU behaves as CUDA does; before and after it behaves as a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from gradplan.probes.simulator import autocast
from gradplan.probes.simulator.semantics import CublasWorkspace, cuda_semantics
from gradplan.probes.simulator.trace import Recorder, Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training
from gradplan.probes.workload import Workload

Operators = Callable[..., list[str]]
OnCpu = Callable[[Callable[[], object]], list[str]]
Traced = Callable[..., Trace]
Load = Callable[[str], Workload]
A100 = (8, 0)


# Dropout


def dropped(p: float, train: bool = True, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    def run() -> None:
        inputs = torch.randn(1000, dtype=dtype, requires_grad=True)
        functional.dropout(inputs, p, train).sum().backward()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_a_mask_of_one_byte_an_element(dtype: torch.dtype, traced: Traced) -> None:
    """aten/src/ATen/native/cuda/Dropout.cu: the mask is boolean, whatever the input's type."""
    inputs, output, mask, *_, grad = traced(dropped(0.1, dtype=dtype)).sizes
    assert (inputs, output, mask, grad) == (1000 * dtype.itemsize, 1000 * dtype.itemsize, 1000, 1000 * dtype.itemsize)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False), (1.0, False)])
def test_dropout_that_drops_nothing_allocates_nothing(p: float, train: bool, traced: Traced) -> None:
    assert traced(dropped(p, train)).sizes == (4000, 4, 4, 4000), "inputs, loss and its gradient, gradient"


def test_dropout_of_everything_keeps_no_mask(traced: Traced) -> None:
    """The fused kernel serves 0 < p < 1 (aten/src/ATen/native/Dropout.cpp); p = 1 is a product with zero."""
    assert 1000 not in traced(dropped(1.0)).sizes


def test_dropout_computes_dropout() -> None:
    with cuda_semantics(A100, are_fake=False):
        inputs = torch.ones(10_000, requires_grad=True)
        output = functional.dropout(inputs, 0.25)
        output.sum().backward()
        assert torch.equal(functional.dropout(inputs, 1.0), torch.zeros(10_000))
        assert functional.dropout(inputs, 0.5, training=False) is inputs
    kept = output[output > 0]
    assert torch.allclose(kept, torch.tensor(4 / 3))
    assert 0.7 < len(kept) / 10_000 < 0.8
    assert torch.equal(inputs.grad, output.detach())


def test_dropout_in_place_keeps_a_mask_of_the_inputs_type(operators: Operators) -> None:
    """CUDA has no fused kernel for it."""
    names = operators(lambda: functional.dropout(torch.ones(10), 0.5, inplace=True))
    assert "native_dropout" not in names
    assert "bernoulli_" in names


# cuBLAS


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [
        ((7, 5), 8_519_680),
        ((8, 0), 8_519_680),
        ((8, 9), 8_519_680),
        ((9, 0), 32 * 2**20),
        ((10, 0), 32 * 2**20),
        ((12, 0), 32 * 2**20),
    ],
)
def test_each_threads_first_matrix_product_takes_a_workspace_for_good(
    capability: tuple[int, int], num_bytes: int, traced: Traced
) -> None:
    """8519680 bytes: pytorch/pytorch issue 95668. 32 MiB: parseChosenWorkspaceSize in CublasHandlePool.cpp."""

    def steps() -> None:
        layer = nn.Linear(4, 4)
        for _ in range(3):
            layer(torch.ones(2, 4)).sum().backward()

    trace = traced(steps, capability)
    workspaces = [index for index, size in enumerate(trace.sizes) if size == num_bytes]
    assert len(workspaces) == 2, "the forward pass's and autograd's"
    assert all(~index not in trace.events for index in workspaces)


@pytest.mark.parametrize(
    "product",
    [
        lambda: torch.ones(2, 3) @ torch.ones(3, 2),
        lambda: torch.ones(2, 3) @ torch.ones(3),
        lambda: torch.ones(5, 2, 3) @ torch.ones(5, 3, 2),
        lambda: torch.addmm(torch.ones(2), torch.ones(2, 3), torch.ones(3, 2)),
        lambda: torch.addmv(torch.ones(2), torch.ones(2, 3), torch.ones(3)),
        lambda: torch.baddbmm(torch.ones(5, 2, 2), torch.ones(5, 2, 3), torch.ones(5, 3, 2)),
        lambda: torch.einsum("ij,jk", torch.ones(2, 3), torch.ones(3, 2)),
        lambda: functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)),
    ],
)
def test_every_kind_of_matrix_product_needs_the_workspace(product: Callable[[], Tensor], traced: Traced) -> None:
    assert traced(product).sizes.count(8_519_680) == 1


def test_a_step_without_matrix_products_takes_no_workspace(traced: Traced) -> None:
    def convolve() -> None:
        layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        layer(torch.ones(2, 3, 8, 8)).square().mean().backward()

    assert 8_519_680 not in traced(convolve).sizes


@pytest.mark.parametrize(("version", "num_bytes"), [("2.13.1", 8_519_680), ("2.14.0", 32 * 2**20)])
def test_jetson_thors_workspace_grew_with_torch_2_14(version: str, num_bytes: int) -> None:
    """pytorch/pytorch#189312, of July 2026."""
    assert CublasWorkspace((11, 0), TorchVersion(version)).num_bytes == num_bytes


def test_a_workspace_belongs_to_one_recording() -> None:
    first, second = CublasWorkspace(A100), CublasWorkspace(A100)
    matmul = torch.ops.aten.mm.default
    assert (first(matmul), first(matmul), second(matmul)) == (8_519_680, None, 8_519_680)
    assert CublasWorkspace(A100)(torch.ops.aten.add.Tensor) is None


# Embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_indices", "num_rows"), [(5000, 300), (5000, 90_000)])
def test_an_embeddings_backward_sums_parts_of_rows_in_fp32(
    num_indices: int, num_rows: int, dtype: torch.dtype, traced: Traced
) -> None:
    """EmbeddingBackwardKernel.cu: grad_weight_per_segment has a row for each part of equal indices, and goes again."""

    def run() -> None:
        layer = nn.Embedding(num_rows, 24, dtype=dtype)
        layer(torch.zeros(num_indices, dtype=torch.long)).sum().backward()

    trace = traced(run)
    parts = max(index for index, size in enumerate(trace.sizes) if size == num_indices * 24 * 4)
    assert trace.births[parts].moment == "backward"
    assert trace.sizes.count(num_indices * 8) >= 3, "the indices, and two sorted copies"
    assert all(event < 0 for event in trace.events[trace.events.index(parts) + 1 : trace.events.index(~parts)])


def test_an_embeddings_gradient_can_be_differentiated_again() -> None:
    def penalty(is_simulated: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer, rows = nn.Embedding(7, 3), torch.tensor([1, 2, 2, 5])
        with cuda_semantics(A100, are_fake=False) if is_simulated else nullcontext():
            loss = layer(rows).pow(3).sum()
            (gradient,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
            gradient.square().sum().backward()
        return [gradient.detach(), layer.weight.grad]

    for one, other in zip(penalty(True), penalty(False), strict=True):
        assert torch.equal(one, other)


# Optimizers

SMALL, LARGE = 8 * 100, 100 * 60  # the elements of its two parameters
PARAMETERS = SMALL + LARGE
TWO_WEIGHTS = """
import torch
from torch import nn

def build_model():
    return nn.ParameterList([nn.Parameter(torch.zeros(8, 100)), nn.Parameter(torch.zeros(100, 60))])

def build_batch(n):
    return torch.randn(n, 8)

def compute_loss(model, batch):
    return (batch @ model[0] @ model[1]).mean()

def build_optimizer(model, lr):
    return torch.optim.OPTIMIZER
"""


def trace_of(job: Workload, precision: str = "32-true", max_grad_norm: float | None = None) -> Trace:
    return trace_training(Setup(job, precision, A100, max_grad_norm), Tensors.FAKE, 1, 2)


def num_elements_at_the_peak(trace: Trace) -> int:
    """fp32 elements at once, cuBLAS' workspaces apart."""
    return (trace.peak_live_bytes - 2 * 8_519_680) // 4


@pytest.mark.parametrize(
    ("options", "temporaries"),
    [
        ("", PARAMETERS),
        (", foreach=True", PARAMETERS),
        # The for-loop has two temporaries of one parameter, a square root and that divided by the bias correction,
        # while a Python name still holds what came of the parameter before.
        (", foreach=False", 2 * LARGE + SMALL),
        # The fused kernel has none; then the peak is in backward, where the new gradient of one parameter is made.
        (", fused=True", LARGE),
    ],
    ids=["default", "foreach", "for-loop", "fused"],
)
def test_adams_step_holds_a_temporary_of_all_parameters_by_default(
    options: str, temporaries: int, workload: Load
) -> None:
    """Documentation of torch.optim.Adam: foreach "uses ~ sizeof(params) more peak memory", and is CUDA's default."""
    job = workload(TWO_WEIGHTS.replace("OPTIMIZER", f"Adam(model.parameters(), lr=lr{options})"))
    parameters_gradients_and_two_moments = 4 * PARAMETERS
    a_samples_activations_and_single_numbers = 300
    beyond = num_elements_at_the_peak(trace_of(job)) - parameters_gradients_and_two_moments - temporaries
    assert 0 <= beyond < a_samples_activations_and_single_numbers


def test_clipping_takes_the_foreach_implementation(operators: Operators) -> None:
    def clip() -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        model(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert "_foreach_norm" in operators(clip)


ACCUMULATING = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)


@pytest.mark.parametrize("name", ACCUMULATING)
def test_every_optimizer_that_accumulates_takes_two_steps_on_fake_tensors(name: str, workload: Load) -> None:
    text = TWO_WEIGHTS.replace("OPTIMIZER", f"{name}(list(model.parameters()), lr=lr)")
    if name == "SparseAdam":
        text = text.replace("(batch @ model[0] @ model[1]).mean()", "sparse_loss(model)") + (
            "\ndef sparse_loss(model):\n"
            "    rows = torch.tensor([1, 2])\n"
            "    return sum(nn.functional.embedding(rows, weight, sparse=True).square().sum() for weight in model)\n"
        )
    trace = trace_of(workload(text))
    num_states = {"SGD": 0, "RMSprop": 1, "Adagrad": 1, "Adamax": 2, "NAdam": 2, "RAdam": 2, "Adadelta": 2}.get(name)
    if num_states is not None:
        assert trace.sizes.count(LARGE * 4) >= num_states
        assert num_elements_at_the_peak(trace) >= (2 + num_states) * PARAMETERS


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_every_precision_takes_two_steps_with_and_without_clipping(
    precision: str, max_grad_norm: float | None, workload: Load
) -> None:
    job = workload(TWO_WEIGHTS.replace("OPTIMIZER", "AdamW(model.parameters(), lr=lr)"))
    trace = trace_of(job, precision, max_grad_norm)
    if precision == "bf16-true":
        assert trace.sizes[:2] == (SMALL * 2, LARGE * 2)
        assert LARGE * 4 not in trace.sizes
    else:
        assert trace.sizes[:2] == (SMALL * 4, LARGE * 4)
        assert trace.sizes.count(LARGE * 2) == 2 * 4, "each forward's copy of the weight, and its gradient"


# Before and after

SEQUENCE = (2, 5, 8)


def everything_that_is_replaced() -> None:
    inputs = torch.ones(SEQUENCE, requires_grad=True)
    functional.dropout(inputs, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        functional.layer_norm(torch.ones(3, 4, dtype=torch.bfloat16), (4,))
        functional.avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=torch.bfloat16), 2)
        torch.ones(4, dtype=torch.bfloat16).prod()
        functional.softmax(torch.ones(4, dtype=torch.bfloat16), 0)
    functional.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 8)] * 3)
    nn.LSTM(8, 4)(inputs)
    nn.GRU(8, 4)(inputs)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_everything_is_as_before_afterwards(on_cpu: OnCpu) -> None:
    before = on_cpu(everything_that_is_replaced)
    with cuda_semantics(A100):
        inside = on_cpu(everything_that_is_replaced)
    assert on_cpu(everything_that_is_replaced) == before
    assert inside != before
    for name in ("native_dropout", "_scaled_dot_product_efficient_attention", "_foreach_sqrt"):
        assert name not in before


def test_everything_is_as_before_after_an_error(on_cpu: OnCpu) -> None:
    before = on_cpu(everything_that_is_replaced)
    compile_before, autocast_before = torch.compile, torch.autocast.__init__
    with pytest.raises(KeyError), cuda_semantics(A100):
        raise KeyError
    assert on_cpu(everything_that_is_replaced) == before
    assert torch.compile is compile_before
    assert torch.autocast.__init__ is autocast_before


def test_an_lstm_of_real_steps_runs_without_onednn_and_convolutions_with_it() -> None:
    """Its LSTM reserves other memory than CUDA's; without it a convolution takes many times as long."""
    layer, steps = nn.LSTM(4, 3, batch_first=True), torch.randn(2, 5, 4)
    expected = layer(steps)[0]
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with cuda_semantics(A100, are_fake=False), Names():
        out = layer(steps)[0]
        out.sum().backward()
        assert torch._C._get_mkldnn_enabled()
    torch.testing.assert_close(out, expected)
    assert "mkldnn_rnn_layer" not in seen
    assert "addmm" in seen or "mm" in seen


def test_the_simulation_can_be_entered_again_and_again(traced: Traced) -> None:
    assert len({traced(dropped(0.1)) for _ in range(3)}) == 1


# torch.compile, autocast by the user


def test_torch_compile_runs_eagerly() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 1

    with cuda_semantics(A100):
        model = nn.Linear(2, 2)
        model.compile()
        assert torch.compile(model) is model
        assert torch.compile(function, mode="max-autotune") is function
        assert torch.compile(fullgraph=True)(function) is function
        assert torch.equal(torch.compile(function)(torch.ones(1)), torch.tensor([2.0]))
    assert calls == [1]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_autocast_to_cuda_in_the_users_forward_is_autocast_of_the_simulated_gpu(dtype: torch.dtype | None) -> None:
    """CUDA's default is float16, the CPU's bfloat16 (documentation of torch.amp)."""
    with cuda_semantics(A100), FakeTensorMode(), Recorder(kernels=autocast.KERNELS):
        with torch.autocast("cuda", dtype=dtype):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert functional.softmax(product, -1).dtype == torch.float32
        with torch.autocast("cuda", dtype=dtype, enabled=False):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        with torch.amp.autocast(device_type="cuda", dtype=dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product.dtype
    assert product.dtype == (dtype or torch.float16)


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast.*:FutureWarning")
def test_the_old_name_of_cudas_autocast_is_autocast_of_the_simulated_gpu() -> None:
    with cuda_semantics(A100), torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_as_a_decorator_is_autocast_of_the_simulated_gpu() -> None:
    with cuda_semantics(A100):

        @torch.autocast("cuda", dtype=torch.bfloat16)
        def product() -> Tensor:
            return torch.ones(2, 2) @ torch.ones(2, 2)

        assert product().dtype == torch.bfloat16


def test_matrices_of_different_types_are_not_multiplied(workload: Callable[[str], Workload]) -> None:
    """As every device refuses it, fake tensors would not: a model that casts to fp32 cannot run in bf16-true."""
    job = workload(
        "import torch\n"
        "from torch import nn\n"
        "build_model = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "build_batch = lambda n: torch.ones(n, 4)\n"
        "def compute_loss(model, batch):\n"
        "    return model[1](model[0](batch).float()).mean()\n"
    )
    trace_training(Setup(job, "32-true", (8, 0)), Tensors.FAKE, 2, 1)
    trace_training(Setup(job, "bf16-mixed", (8, 0)), Tensors.FAKE, 2, 1)
    with pytest.raises(RuntimeError, match="must have the same dtype, but got"):
        trace_training(Setup(job, "bf16-true", (8, 0)), Tensors.FAKE, 2, 1)
