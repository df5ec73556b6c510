"""deltawave's layers through the `kernels` package, as transformers' `use_kernels=True` finds them: registered for the CPU, and
put by `kernelize` in the place of functions and a layer that fail if they are called."""

import importlib.metadata

import torch
from kernels import Mode, kernelize, use_kernel_forward_from_hub, use_kernelized_func
from torch import nn

import deltawave.fla
import deltawave.transformers

HK, HV, K, V = 2, 4, 32, 32


def fails(*arguments, **named):
    raise AssertionError("kernelize left the function that was there")


@use_kernel_forward_from_hub("chunk_gated_delta_rule")
def chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
          use_qk_l2norm_in_kernel=False, **kwargs):
    return fails()


@use_kernel_forward_from_hub("fused_recurrent_gated_delta_rule")
def recurrent(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              **kwargs):
    return fails()


@use_kernel_forward_from_hub("causal_conv1d_fn")
def conv(hidden_states, weight, bias=None, activation=None, **kwargs):
    return fails()


@use_kernel_forward_from_hub("causal_conv1d_update")
def update(hidden_states, conv_state, weight, bias=None, activation=None):
    return fails()


@use_kernel_forward_from_hub("RMSNormGated")
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon, self.activation = nn.Parameter(torch.ones(V)), 1e-6, "silu"

    def forward(self, hidden_states, gate):
        return fails()


@use_kernelized_func(chunk, recurrent, conv, update)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def forward(self, q, k, v, g, beta, rows, weight, conv_state):
        o, state = chunk(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        one = [x[:, :1] for x in (q, k, v)]
        o2, _ = recurrent(*one, g=g[:, :1], beta=beta[:, :1], initial_state=state, output_final_state=True,
                          use_qk_l2norm_in_kernel=True)
        y = conv(rows, weight, None, activation="silu")
        y2 = update(rows[:, :, :1], conv_state, weight, None, "silu")
        return o, o2, y, y2, self.norm(o.reshape(-1, V), v.reshape(-1, V))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deltawave.transformers.register_hub_kernels("cpu")
    model = Model().eval()
    kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)
    q, k = (torch.randn(1, 9, HK, K).bfloat16() for _ in range(2))
    v, g, beta = torch.randn(1, 9, HV, V).bfloat16(), -torch.rand(1, 9, HV), torch.rand(1, 9, HV).bfloat16()
    rows, weight, state = torch.randn(1, 20, 9).bfloat16(), torch.randn(20, 4).bfloat16(), torch.zeros(1, 20, 4).bfloat16()
    with torch.no_grad():
        found = model(q, k, v, g, beta, rows, weight, state)
        wanted, _ = deltawave.fla.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert torch.equal(found[0], wanted)
    assert [tuple(x.shape) for x in found] == [(1, 9, HV, V), (1, 1, HV, V), (1, 20, 9), (1, 20, 1), (9 * HV, V)]
    print(f"kernels {importlib.metadata.version('kernels')}: five layers registered and called")


if __name__ == "__main__":
    main()
