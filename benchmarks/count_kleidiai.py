"""KleidiAI's int4 kernels in the windows of kernels/count.cc, reached through torch: runs on aarch64 with torch 2.6 or
later, under qemu with scripts/arm/insn_plugin.c (peer_counts.py does that). The whole operator is counted; what is left
in the difference of two numbers of channels is the product itself, without dispatch and the quantisation of x.
"""

import ctypes

import torch

K_GEMV, K_GEMM, ROWS, GROUP = 4096, 1024, 128, 32
CHANNELS = (128, 256)


def main() -> None:
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    window = 0
    for kind, rows, k in (("gemv", 1, K_GEMV), ("gemm", ROWS, K_GEMM)):
        for n in CHANNELS:
            codes, scales = torch.zeros(n, k // 2, dtype=torch.uint8), torch.ones(n, k // GROUP, dtype=torch.bfloat16)
            weight = torch.ops.aten._dyn_quant_pack_4bit_weight(codes, scales, None, GROUP, k, n)
            # torch's own layout, without KleidiAI, has one number for each pair of codes and each scale.
            assert weight.dtype == torch.uint8 and weight.numel() > n * k // 2, "torch did not take KleidiAI's path"
            x = torch.randn(rows, k)
            torch.ops.aten._dyn_quant_matmul_4bit(x, weight, GROUP, k, n)
            units = weight.numel() if rows == 1 else rows * n * k
            print(f"window {window} {kind} int4-g32 {n} {units}", flush=True)
            libc.prctl(0x544C4501, 0, 0, 0, 0)
            torch.ops.aten._dyn_quant_matmul_4bit(x, weight, GROUP, k, n)
            libc.prctl(0x544C4502, window, 0, 0, 0)
            window += 1


if __name__ == "__main__":
    main()
