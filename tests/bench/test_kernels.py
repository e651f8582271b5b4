from __future__ import annotations

import pytest

from hardsphere.bench.kernels import (
    COPIES,
    ELEMENTWISE,
    OPTIMISER,
    OTHER,
    PRODUCTS,
    REDUCTIONS,
    as_text,
    group_of,
    idle_share,
    summarise,
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", PRODUCTS),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", PRODUCTS),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized>", PRODUCTS),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", PRODUCTS),
        ("triton_tem_fused_addmm_0", PRODUCTS),
        ("triton_poi_fused__native_batch_norm_legit_functional_convolution_relu_3", ELEMENTWISE),
        ("triton_red_fused_native_batch_norm_backward_threshold_backward_17", REDUCTIONS),
        ("triton_per_fused_sum_2", REDUCTIONS),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>", REDUCTIONS),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", REDUCTIONS),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", ELEMENTWISE),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>", OPTIMISER),
        ("Memcpy DtoD (Device -> Device)", COPIES),
        ("Memset (Device)", COPIES),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", COPIES),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", COPIES),
        ("aten::mkldnn_convolution", PRODUCTS),
        ("aten::addmm", PRODUCTS),
        ("aten::native_batch_norm_backward", REDUCTIONS),
        ("aten::copy_", COPIES),
        ("aten::_foreach_add_", OPTIMISER),
        ("aten::clamp", ELEMENTWISE),
        ("cudaGraphLaunch", OTHER),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert idle_share([("a", 0, 4), ("b", 2, 6), ("c", 8, 10)]) == pytest.approx(0.2)
    assert idle_share([("a", 0, 10), ("b", 2, 3)]) == 0
    assert idle_share([]) is None


def test_times_are_summed_per_step() -> None:
    spans = [("nvjet_a", 0.0, 3000.0), ("triton_poi_b", 3000.0, 4000.0), ("nvjet_a", 4000.0, 7000.0)]
    found = summarise(spans, steps=2, idle=0.25)
    assert found.groups == pytest.approx({PRODUCTS: 6 / 7, ELEMENTWISE: 1 / 7})
    assert found.busy_milliseconds == pytest.approx(3.5)
    assert (found.longest[0].name, found.longest[0].calls, found.longest[0].milliseconds) == ("nvjet_a", 1, 3)
    assert "idle 25.0% of the time" in as_text(found)


def test_nothing_seen_is_no_error() -> None:
    assert summarise([], steps=1, idle=None).groups == {}
