"""The grammar of policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokit.errors import ParameterError
from nanokit.quant.policy import CLASSES, FLOAT_TYPES, METHODS, ROLES, parse_policy

FORMATS = ("int4-sym-g64", "int8-sym-channel", "int4-asym-g32", "nvfp4", "nf4", "q4_1", "int4-sym-global")


def test_a_format_goes_to_every_layer_and_not_to_the_head() -> None:
    """A head quantized by accident costs more quality than all layers together."""
    policy = parse_policy("int4-sym-g64")
    assert {policy.choice(role, 3).name for role in ROLES[:-1]} == {"int4-sym-g64"}
    assert policy.choice("head").format is None


def test_a_mix_names_its_classes() -> None:
    """Attention's format must not reach the feed-forward part, nor the other way round."""
    policy = parse_policy("mix:attn=int4-sym-channel,ffn=int4-sym-g64+gptq,head=q8_0")
    assert [policy.choice(role, 0).name for role in ("q", "o")] == ["int4-sym-channel"] * 2
    assert [policy.choice(role, 0).name for role in ("gate", "down")] == ["int4-sym-g64+gptq"] * 2
    assert policy.choice("head").name == "q8_0"
    assert policy.methods == {"gptq"}


def test_what_a_mix_does_not_name_stays() -> None:
    """`mix:attn=…` alone must leave the feed-forward part as it is stored."""
    assert parse_policy("mix:attn=nvfp4").choice("up", 0).format is None


def test_the_last_override_wins() -> None:
    """Order is the only way to say "all of these, but not that one"."""
    policy = parse_policy("nvfp4;down=int8-sym-g32;0-3.ffn=q8_0;2.down=keep;5=nf4+search")
    assert [policy.choice("down", layer).name for layer in (0, 2, 4, 5)] == [
        "q8_0",
        "keep",
        "int8-sym-g32",
        "nf4+search",
    ]
    assert policy.choice("q", 2).name == "nvfp4"
    assert policy.choice("up", 4).name == "nvfp4"


def test_floats_take_the_head_too() -> None:
    """A head left in codes would make "the model in floats" a file that is not. Named in an override, it is one role of
    many."""
    policy = parse_policy("F16;head=keep;0.down=q8_0")
    assert [policy.choice(role, 0).name for role in ("q", "down", "head")] == ["f16", "q8_0", "keep"]
    assert parse_policy("f32").choice("head").floats == "f32"
    assert parse_policy("q4_0;down=f16").named("head") is None
    assert parse_policy("mix:attn=bf16,ffn=f16").named("head") is None
    assert parse_policy("f16").name == "f16"


def test_one_spelling() -> None:
    """Two names of one policy would be two rows of a table."""
    names = {parse_policy(f"nvfp4;{rule}").name for rule in ("3-3.q=keep", "03.q = keep", "3.Q=keep")}
    assert names == {"nvfp4;3.q=keep"}
    assert parse_policy("nvfp4;0.all=nf4").name == parse_policy("nvfp4;0=nf4").name
    assert parse_policy("nvfp4 + gptq").name == "nvfp4+gptq"
    assert parse_policy("auto:4.1234567").auto_bits == parse_policy(parse_policy("auto:4.1234567").name).auto_bits


def test_auto_has_a_budget_and_no_choices_yet() -> None:
    """Taking auto for a policy that changes nothing would report the stored model's quality as its own."""
    policy = parse_policy("auto:4.25")
    assert policy.auto_bits == 4.25
    with pytest.raises(ParameterError, match="resolved for a model"):
        policy.choice("q", 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown weight format"),
        ("f64", "f32, f16, bf16"),
        ("f16+gptq", "not rounded by a method"),
        ("q4_0;head=f32+search", "not rounded by a method"),
        ("int5-sym-g64", "nvfp4"),
        ("int4-sym-g64+magic", "search, awq, gptq, smooth"),
        ("int4-sym-g64;foo=q8_0", "attn, ffn, all"),
        ("int4-sym-g64;q8_0", "says nothing of a matrix"),
        ("int4-sym-g64;=q8_0", "says nothing of a matrix"),
        ("int4-sym-g64;5-3.q=keep", "run upwards"),
        ("int4-sym-g64;3.=keep", "says nothing of a matrix"),
        ("int4-sym-g64;1.head=q8_0", "says nothing of a matrix"),
        ("mix:", "says nothing of a matrix"),
        ("mix:0.attn=q8_0", "says nothing of a matrix"),
        ("auto:", "no budget"),
        ("auto:nan", "no budget"),
        ("auto:99", "no budget"),
        ("auto:4;q=keep", "no overrides"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str) -> None:
    """A typing error that matches nothing must not quantize in silence."""
    with pytest.raises(ParameterError, match=r"(?s)policy.*" + says):
        parse_policy(text)


def test_a_layer_that_is_not_there() -> None:
    """An override of layer 30 in a model of 30 would change nothing."""
    policy = parse_policy("nvfp4;28-30.ffn=q8_0")
    policy.check_layers(31)
    with pytest.raises(ParameterError, match=r"no layer 30(?s:.*)0 to 29"):
        policy.check_layers(30)


choices = st.one_of(
    st.just("keep"),
    st.sampled_from(FLOAT_TYPES),
    st.builds(lambda f, m: f + m, st.sampled_from(FORMATS), st.sampled_from(["", *("+" + m for m in METHODS)])),
)
selectors = st.builds(
    lambda layers, word: ".".join(part for part in (layers, word) if part),
    st.sampled_from(["", "0", "2-5"]), st.sampled_from([*CLASSES, *ROLES[:-1]]),
)  # fmt: skip


@given(choices, st.lists(st.tuples(selectors, choices), max_size=3))
def test_a_name_reads_as_the_same_policy(base: str, overrides: list[tuple[str, str]]) -> None:
    """Records keep the name: read again, it has to mean the same."""
    text = ";".join([base.upper(), *(f" {selector}={choice} " for selector, choice in overrides)])
    policy = parse_policy(text)
    again = parse_policy(policy.name)
    assert again == policy
    assert [policy.choice(r, n).name for r in ROLES[:-1] for n in range(7)] == [
        again.choice(r, n).name for r in ROLES[:-1] for n in range(7)
    ]
