"""The config against published counts, and its refusals."""

from __future__ import annotations

import dataclasses

import pytest

from k3fuse.patterns.models import KimiK3Config

PUBLISHED = KimiK3Config()


def test_published_layer_kinds() -> None:
    assert PUBLISHED.mla_layers == (*range(3, 92, 4), 92)
    assert len(PUBLISHED.mla_layers) == 24
    assert len(PUBLISHED.kda_layers) == 69
    assert sorted(PUBLISHED.mla_layers + PUBLISHED.kda_layers) == list(range(93))
    assert [layer for layer in range(93) if PUBLISHED.is_kda(layer)] == list(PUBLISHED.kda_layers)
    assert [layer for layer in range(93) if not PUBLISHED.is_moe(layer)] == [0]


def test_published_block_writes() -> None:
    assert PUBLISHED.block_write_layers == (0, 12, 24, 36, 48, 60, 72, 84)
    assert PUBLISHED.num_blocks == 8
    assert all(PUBLISHED.is_kda(layer) for layer in PUBLISHED.block_write_layers)
    assert [PUBLISHED.blocks_before(n) for n in (0, 1, 12, 13, 84, 85, 93)] == [0, 1, 1, 2, 7, 8, 8]


@pytest.mark.parametrize(
    ("layers", "moe"), [(None, 92), (93, 92), (1, 0), (2, 1), (13, 12)], ids=str
)
def test_expected_sites(layers: int | None, moe: int) -> None:
    count = 93 if layers is None else layers
    assert PUBLISHED.expected_sites(layers) == {
        "attention_projection": count,
        "output_projection": count,
        "router": moe,
        "experts": moe,
        "attn_res": count + 1,
    }


def test_expected_sites_follow_the_dense_layers() -> None:
    config = KimiK3Config.small(6, first_k_dense_replace=2, moe_layer_freq=2)
    assert config.expected_sites()["experts"] == 2


@pytest.mark.parametrize(
    ("tp", "kda", "mla"), [(4, 12_448, 5184), (8, 6288, 3648), (16, 3216, 2880)], ids=str
)
def test_published_projection_rows(tp: int, kda: int, mla: int) -> None:
    assert PUBLISHED.kda_projection_rows(tp) == kda
    assert PUBLISHED.mla_projection_rows(tp) == mla


def test_derived_widths() -> None:
    assert PUBLISHED.kda_width == 12_288
    assert PUBLISHED.latent_row == 576
    assert PUBLISHED.shared_intermediate_size == 6144


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("num_experts", True),
        ("moe_intermediate_size", 3000),
        ("routed_expert_hidden_size", 48),
        ("num_experts_per_token", 897),
        ("full_attn_layers", (4, 94)),
        ("full_attn_layers", (8, 4)),
        ("full_attn_layers", (4, 4)),
        ("first_k_dense_replace", 94),
        ("rms_norm_eps", 0.0),
        ("routed_scaling_factor", float("nan")),
        ("activation_situ_linear_beta", -1.0),
        ("gate_lower_bound", 0.5),
        ("hidden_act", "silu"),
        ("mla_use_nope", False),
        ("topk_group", 2),
    ],
)
def test_bad_field_names_itself(field: str, value: object) -> None:
    dataclasses.replace(PUBLISHED, vocab_size=32)  # control: another field may change
    with pytest.raises(ValueError, match=f"^{field}=.* is not usable: "):
        dataclasses.replace(PUBLISHED, **{field: value})  # type: ignore[arg-type]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PUBLISHED.hidden_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("tp", [0, 5, 64])
def test_bad_tp(tp: int) -> None:
    PUBLISHED.check_tp(16)  # control
    with pytest.raises(ValueError, match=f"^tp_size={tp} "):
        PUBLISHED.check_tp(tp)


def test_tp_must_leave_whole_scale_groups() -> None:
    config = KimiK3Config.small()
    config.check_tp(4)  # control: 32 columns a rank
    with pytest.raises(ValueError, match="multiple of 32 per rank"):
        dataclasses.replace(config, moe_intermediate_size=64).check_tp(4)


@pytest.mark.parametrize("layer", [-1, 93])
def test_layer_outside_the_model(layer: int) -> None:
    assert PUBLISHED.is_kda(92) is False  # control
    for ask in (PUBLISHED.is_kda, PUBLISHED.is_moe, PUBLISHED.is_block_write):
        with pytest.raises(ValueError, match=f"^layer={layer} "):
            ask(layer)
    with pytest.raises(ValueError, match=r"^num_layers=94 "):
        PUBLISHED.expected_sites(94)


def test_small_has_every_kind_of_layer() -> None:
    config = KimiK3Config.small()
    assert config.kda_layers == (0, 1, 2)
    assert config.mla_layers == (3,)
    assert config.block_write_layers == (0, 2)
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    for tp in (1, 2, 4):
        config.check_tp(tp)
    assert KimiK3Config.small(6).mla_layers == (3, 5)
