"""From a configuration to the rank of every head: bounds, multiples, precedence, and layers left alone."""

import pytest

from hf_wsvd import WSVDConfig
from hf_wsvd.quantizer_config import rank_for_ratio, resolve_ranks


@pytest.mark.parametrize(
    ("ratio", "head_dim", "multiple", "rank"),
    [
        (0.5, 128, 8, 64),
        (0.52, 128, 8, 64),  # 66.56: rounded to 64, never up to 72
        (0.52, 64, 8, 32),
        (0.3, 10, 1, 3),  # 0.3 * 10 is 2.9999999999999996 in binary
        (0.7, 10, 1, 7),
        (0.29, 100, 1, 29),
        (0.1, 80, 8, 8),
        (0.09, 80, 8, 7),  # below one multiple: whole ranks
        (0.001, 64, 8, 1),
        (1, 80, 32, 80),  # the whole head, multiple or not
        (0.999, 80, 32, 64),
    ],
)
def test_rank_of_a_ratio(ratio, head_dim, multiple, rank):
    assert rank_for_ratio(ratio, head_dim, multiple) == rank


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("multiple", [1, 8, 16])
def test_a_ratio_is_a_bound_on_the_cache_that_is_used_up_to_one_multiple(head_dim, multiple):
    for percent in range(1, 100):
        ratio = percent / 100
        rank = rank_for_ratio(ratio, head_dim, multiple)
        assert 1 <= rank < head_dim
        assert rank == 1 or rank * 100 <= percent * head_dim
        assert (rank + multiple) * 100 > percent * head_dim
        assert rank % multiple == 0 or rank < multiple


def test_the_more_particular_field_decides():
    dims = [16, 16]
    config = WSVDConfig(rank_ratio=0.25, k_rank_ratio=0.5, v_rank=[3, None], rank_multiple=1)
    assert resolve_ranks(config, "k", dims) == [8, 8]
    assert resolve_ranks(config, "v", dims) == [3, None]
    config = WSVDConfig(rank_ratio=0.25, k_rank_ratio=0.5, k_rank=5, rank_multiple=1)
    assert resolve_ranks(config, "k", dims) == [5, 5]
    assert resolve_ranks(config, "v", dims) == [4, 4]


def test_nothing_given_nothing_cut():
    config = WSVDConfig(rank_ratio=None, k_rank=4)
    assert resolve_ranks(config, "k", [16]) == [4]
    assert resolve_ranks(config, "v", [16]) == [None]


def test_layers_of_other_head_dims_get_their_own_ranks():
    config = WSVDConfig(rank_ratio=[0.5, 0.25, 0.5, None], rank_multiple=4, layers_to_not_convert=[2])
    assert resolve_ranks(config, "k", [16, 64, 16, 16]) == [8, 16, None, None]


def test_layers_that_cannot_be_converted_are_left_alone():
    assert resolve_ranks(WSVDConfig(k_rank=8), "k", [16, None, 16]) == [8, None, 8]


@pytest.mark.parametrize("field", ["rank_ratio", "k_rank_ratio", "k_rank"])
def test_a_list_must_have_one_entry_a_layer(field):
    value = 4 if field == "k_rank" else 0.5
    with pytest.raises(ValueError, match=rf"{field}='a list of 2'.*a list of 3, one entry a decoder layer"):
        resolve_ranks(WSVDConfig(**{field: [value] * 2}), "k", [16] * 3)


def test_a_rank_above_head_dim_is_refused_with_the_layer():
    config = WSVDConfig(v_rank=[16, 17])
    with pytest.raises(ValueError, match=r"v_rank=17 .*from 1 to head_dim = 16 \(layer 1\)"):
        resolve_ranks(config, "v", [16, 16])
    assert resolve_ranks(config, "v", [16, 32]) == [16, 17]


def test_a_layer_number_beyond_the_decoder_is_refused():
    with pytest.raises(ValueError, match=r"layers_to_not_convert=3 .*from 0 to 2"):
        resolve_ranks(WSVDConfig(layers_to_not_convert=[3]), "k", [16] * 3)
