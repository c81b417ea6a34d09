"""Sizes that no kernel could have are refused where they are written down."""

import pytest

from specjax.pallas.kernel_config import KernelConfig, Tile


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"row": (256, 4)}, r"row is \(256, 4\); it needs a Tile"),
        ({"target": Tile(-256, 4)}, "target.size is -256; it needs a Python int >= 128, a power"),
        ({"residual": Tile(384, 4)}, "residual.size is 384; it needs a power of two >= 128."),
        ({"row_search": Tile(64, 4)}, "row_search.size is 64; it needs .* >= 128, a power of two"),
        ({"buffer_search": Tile(256, 3)}, "buffer_search.num_warps is 3; it .* from 1 to 32."),
        ({"num_draw_warps": 64}, "num_draw_warps is 64; it needs a power of two from 1 to 32."),
        ({"num_judge_warps": 0}, "num_judge_warps is 0; it needs a Python int >= 1"),
        ({"num_pivots": 6}, "num_pivots is 6; it needs a power of two >= 1."),
        ({"num_noise_splits": 3}, "num_noise_splits is 3; it needs a power of two >= 1."),
        ({"num_register_logits": 2.0**11}, "num_register_logits is 2048.0; it needs a Python int"),
        ({"num_search_programs": 17}, "num_search_programs is 17; it needs at most 16 programs"),
        ({"max_small_programs": -1}, "max_small_programs is -1; it needs a Python int >= 0"),
    ],
)
def test_a_size_that_no_kernel_could_have_is_refused(field, message):
    with pytest.raises(ValueError, match=message):
        KernelConfig(**field)


def test_the_least_and_the_largest_sizes_are_taken():
    least = KernelConfig(row=Tile(128, 1), num_noise_splits=0, max_small_programs=0, max_reread=0)
    assert least.reduce_tile(1, 10**5) == Tile(128, 1)
    assert KernelConfig(num_draw_warps=32, num_search_programs=16).search_programs(1) == 16


@pytest.mark.parametrize(
    ("num_requests", "width", "tile"),
    [(64, 131072, Tile(32768, 8)), (63, 131072, Tile(16384, 8)), (8, 131072, Tile(4096, 4))],
)
def test_a_share_of_a_residual_has_large_tiles_where_these_fill_a_gpu(num_requests, width, tile):
    assert KernelConfig().split_residual_tile(num_requests, width, False) == tile
    own = Tile(8192, 4)
    assert KernelConfig(residual=own).split_residual_tile(num_requests, width, False) == own
