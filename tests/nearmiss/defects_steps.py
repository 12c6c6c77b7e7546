"""Steps left out, doubled or put in between."""

from __future__ import annotations

from defect import MIX, PROJECTED, Defect, W, wrong

STEPS: tuple[Defect, ...] = (
    # --- steps left out, doubled or put in between
    wrong("step", "o_add_norm", "changed", "OP_MISMATCH -", norm_weightless=True),
    wrong(
        "step",
        "attn_res",
        "kept",
        "OP_MISMATCH USER_ESCAPES -",
        norm_weightless=True,
        no_out_norm=False,
    ),
    wrong("step", "o_attn_res", "kept", "OP_MISMATCH USER_ESCAPES -", norm_weightless=True),
    wrong("step", "experts", "kept", "OP_MISMATCH", norm_weightless=True, **W),
    wrong("step", "experts", "kept", "OP_MISMATCH", norm=False),
    wrong("step", "opaque", "changed", "OP_MISMATCH", norm=False),
    wrong("step", "o_add_norm", "changed", "OP_MISMATCH -", norm_statistic="layer"),
    wrong(
        "step",
        "attn_res",
        "kept",
        "OP_MISMATCH USER_ESCAPES -",
        norm_statistic="layer",
        no_out_norm=False,
    ),
    wrong("step", "o_add_norm", "changed", "OP_MISMATCH -", norm_sum=True),
    wrong("step", "o_add_norm", "changed", "OP_MISMATCH -", norm_no_reciprocal=True),
    wrong("step", "o_add_norm", "kept", "OP_MISMATCH USER_ESCAPES -", norm_twice=True),
    wrong(
        "step",
        "o_add_norm attention",
        "kept",
        "OP_MISMATCH DTYPE_MISMATCH USER_ESCAPES -",
        norm_one_plus=True,
    ),
    wrong(
        "step",
        "o_attn_res attn_res",
        "kept",
        "OP_MISMATCH DTYPE_MISMATCH USER_ESCAPES -",
        norm_one_plus=True,
        no_out_norm=False,
    ),
    wrong("step", MIX, "changed", "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH -", temperature=0.5),
    wrong("step", MIX, "changed", "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH -", score_bias=0.5),
    wrong("step", MIX, "changed", "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH -", gate="sigmoid"),
    wrong(
        "step",
        MIX,
        "changed",
        "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH -",
        mix_normalised=True,
        mix="dot",
    ),
    wrong("step", MIX, "kept", "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH -", scaled_proj=True),
    wrong(
        "step",
        "attn_res",
        "kept",
        "OP_MISMATCH -",
        no_out_norm=False,
        round_mix=True,
        norm_how="rounded first",
    ),
    *(
        wrong("step", f"{PROJECTED} two_blocks", "changed", "OP_MISMATCH -", between=how)
        for how in ("round trip", "scale", "negate", "roll", "relu")
    ),
    *(
        wrong("step", "opaque experts", "changed", "OP_MISMATCH", between=how)
        for how in ("round trip", "scale", "negate", "roll", "relu")
    ),
    wrong(
        "step",
        f"{PROJECTED} two_blocks opaque experts",
        "kept",
        "OP_MISMATCH USER_ESCAPES -",
        between="widen and back",
    ),
    wrong(
        "step",
        f"{PROJECTED} two_blocks opaque experts",
        "kept",
        "OP_MISMATCH USER_ESCAPES -",
        between="double transpose",
    ),
    wrong(
        "step",
        f"{PROJECTED} two_blocks opaque experts",
        "kept",
        "OP_MISMATCH USER_ESCAPES -",
        between="contiguous",
    ),
    wrong("step", f"{PROJECTED}", "kept", "OP_MISMATCH USER_ESCAPES -", between="dropout"),
    wrong("step", PROJECTED, "changed", "OP_MISMATCH -", after_linear="scale", between="nothing"),
    wrong("step", PROJECTED, "changed", "OP_MISMATCH -", after_linear="relu", between="nothing"),
    wrong(
        "step",
        PROJECTED,
        "kept",
        "OP_MISMATCH USER_ESCAPES -",
        after_linear="clone",
        between="nothing",
    ),
    wrong(
        "step", PROJECTED, "kept", "OP_MISMATCH STRIDE_OR_ALIGN SHAPE_MISMATCH -", linear="flipped"
    ),
    wrong(
        "step", PROJECTED, "kept", "OP_MISMATCH STRIDE_OR_ALIGN SHAPE_MISMATCH -", linear="halved"
    ),
    wrong("step", PROJECTED, "changed", "OP_MISMATCH -", linear="baddbmm"),
    wrong("step", PROJECTED, "changed", "INTERPOSED_OP", bias=True, linear="linear"),
    wrong("step", "attention", "changed", "INTERPOSED_OP", qkv_bias=True, linear="linear"),
    wrong("step", "router", "changed", "INTERPOSED_OP", latent_bias=True, latent=True),
    wrong("step", "router", "changed", "INTERPOSED_OP", logits="biased"),
    wrong(
        "step",
        "experts",
        "changed",
        "OP_MISMATCH INTERPOSED_OP",
        shared_bias=True,
        shared=True,
        shared_linear="linear",
    ),
    wrong(
        "step",
        "experts opaque",
        "changed",
        "OP_MISMATCH INTERPOSED_OP",
        up_bias=True,
        linear="linear",
    ),
    wrong("step", "attention", "kept", "-", scaled_row=True, parts=2),
    *(
        wrong("step", "router", "changed", "-", scoring=how)
        for how in ("tanh", "sqrt softplus", "sigmoid of double", "sigmoid + softmax", "hard")
    ),
    *(
        wrong("step", "router", "changed", codes, scoring="written out", **{knob: value})
        for knob, value, codes in (
            ("most_axis", 0, "ATTR_MISMATCH SHAPE_MISMATCH"),
            ("sum_axis", 0, "ATTR_MISMATCH SHAPE_MISMATCH"),
            ("share", "eps", "OP_MISMATCH"),
            ("share", "one", "OP_MISMATCH"),
            ("share", "mean", "OP_MISMATCH"),
            ("share", "of squares", "OP_MISMATCH"),
            ("share", "reciprocal", "OP_MISMATCH"),
            ("share", "half", "DTYPE_MISMATCH"),
            ("share", "rounded", "DTYPE_MISMATCH"),
            ("most", "amin", "OP_MISMATCH"),
            ("most", "mean", "OP_MISMATCH"),
            ("most", "of all", "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH"),
            ("most", "of twice", "OP_MISMATCH"),
            ("most", "none", "OP_MISMATCH"),
            ("most", "number", "OP_MISMATCH"),
            ("base", 2, "OP_MISMATCH"),
            ("exp_round", True, "OP_MISMATCH"),
        )
    ),
    wrong("step", "router", "changed", "- OP_MISMATCH", logits="scaled"),
    wrong("step", "router", "changed", "- OP_MISMATCH", logits="shifted"),
    *(
        wrong("step", "router", "kept", "STRIDE_OR_ALIGN OP_MISMATCH USER_ESCAPES", renorm=how)
        for how in (
            "max",
            "l2",
            "clamp",
            "floor",
            "upside down",
            "scaled first",
            "softmax",
            "twice",
            "tokens",
        )
    ),
    *(
        wrong(
            "step",
            "experts",
            "changed",
            "OP_MISMATCH ATTR_MISMATCH SHAPE_MISMATCH -",
            combine=how,
            experts="mx",
        )
        for how in (
            "mean",
            "unweighted",
            "weights squared",
            "first slots",
            "flipped weights",
            "scaled",
        )
    ),
)
