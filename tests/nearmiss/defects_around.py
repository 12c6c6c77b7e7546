"""What stands around a site: process groups, readers, crossings; shapes of small operands."""

from __future__ import annotations

from defect import Defect, wrong

AROUND: tuple[Defect, ...] = (
    # --- groups and reductions
    wrong(
        "group",
        "o_add_norm o_attn_res two_blocks",
        "changed",
        "ATTR_MISMATCH OP_MISMATCH -",
        reduce_op="max",
    ),
    wrong(
        "group",
        "o_add_norm o_attn_res two_blocks",
        "changed",
        "ATTR_MISMATCH OP_MISMATCH -",
        reduce_op="avg",
    ),
    wrong("group", "o_add_norm o_attn_res", "kept", "OP_MISMATCH -", reduce_op="none"),
    wrong("group", "o_add_norm o_attn_res", "changed", "OP_MISMATCH -", reduce_twice=True),
    wrong(
        "group",
        "experts opaque",
        "changed",
        "GROUP_MISMATCH OP_MISMATCH",
        shared_op="none",
        shared=True,
    ),
    wrong(
        "group",
        "experts opaque",
        "changed",
        "GROUP_MISMATCH OP_MISMATCH",
        routed_op="none",
        shared=True,
    ),
    wrong(
        "group",
        "experts opaque",
        "changed",
        "ATTR_MISMATCH OP_MISMATCH GROUP_MISMATCH",
        shared_op="avg",
        shared=True,
    ),
    wrong(
        "group",
        "experts opaque",
        "changed",
        "ATTR_MISMATCH OP_MISMATCH GROUP_MISMATCH",
        routed_op="max",
        shared=True,
    ),
    wrong("group", "experts opaque", "changed", "OP_MISMATCH GROUP_MISMATCH", routed_twice=True),
    wrong(
        "group",
        "experts opaque",
        "kept",
        "OP_MISMATCH GROUP_MISMATCH",
        reduce_late=True,
        routed_op="none",
    ),
    wrong(
        "group", "experts opaque", "changed", "GROUP_MISMATCH", shared_group="other", shared=True
    ),
    wrong("group", "o_add_norm o_attn_res attention", "kept", "", reduce_group="other"),
    # --- readers, crossings
    wrong(
        "reader", "o_add_norm", "changed", "USER_ESCAPES", results="partial too", between="nothing"
    ),
    wrong("reader", "router", "changed", "USER_ESCAPES", extra="scores"),
    wrong("reader", "router", "changed", "USER_ESCAPES", extra="logits"),
    wrong("reader", "router", "kept", "", extra="ids"),
    wrong("reader", "experts", "changed", "USER_ESCAPES", **{"routed too": True}),
    # --- what the experts take from the router: right alone where it is something else
    wrong(
        "reader",
        "experts",
        "changed",
        "USER_ESCAPES",
        shared=True,
        experts="mx",
        given_routing=False,
        **{"row too": True},
    ),
    *(
        wrong(
            "handed over",
            "experts",
            "kept",
            "-",
            given_routing=False,
            experts="mx",
            shared=True,
            **{knob: how},
        )
        for knob, how in (
            ("handed", "other latent"),
            ("handed", "scaled latent"),
            ("handed", "other weights"),
            ("handed", "other ids"),
            ("shared_of", "another"),
            ("shared_of", "rolled"),
            ("shared_of", "scaled"),
        )
    ),
    # --- the AttnRes behind the experts: right alone where it reads something else
    *(
        wrong("absorbed", "experts_mix", "kept", codes, **knobs)
        for codes, knobs in (
            ("-", {"mix_of": "another", "delta too": True}),
            ("-", {"mix_of": "rolled"}),
            ("-", {"mix_of": "scaled"}),
            ("-", {"mix_of": "regrouped"}),
            ("-", {"prefix_of": "delta"}),
            ("-", {"prefix_of": "twice"}),
            ("-", {"block_of": "delta"}),
            ("-", {"block_of": "made of delta"}),
            ("-", {"second": True}),
            ("-", {"sum": "a - b"}),
            ("MUTATION_BETWEEN -", {"prefix_written": True, "prefix_of": "given"}),
            ("ALIAS_RISK MUTATION_BETWEEN -", {"delta_written": True}),
        )
    ),
    wrong("reader", "attention", "kept", "", **{"part too": True}),
    wrong("crossed", "two_blocks", "kept", "OP_MISMATCH INTERPOSED_OP", crossed="both"),
    # --- shapes of the small operands
    wrong("shape", "router", "kept", "SHAPE_MISMATCH OP_MISMATCH -", bias="token"),
    wrong("shape", "router", "kept", "SHAPE_MISMATCH OP_MISMATCH -", bias="column"),
    wrong("shape", "router", "kept", "SHAPE_MISMATCH OP_MISMATCH -", bias="row"),
    wrong("shape", "router", "kept", "-", bias="half"),
    wrong("shape", "router", "kept", "-", bias="flipped"),
    wrong("shape", "router", "kept", "-", bias="none"),
)
