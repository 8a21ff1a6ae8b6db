"""Markers of every family, in answers that should have none."""

import pytest

from lockstep.health import turn_markers, unbalanced_marker

TURNS = {
    "ChatML": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "Llama 2": ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    "Llama 3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "Llama 4": ("<|header_start|>", "<|header_end|>", "<|eot|>"),
    "Gemma": ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>"),
    "Mistral": ("[INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "Phi": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|im_sep|>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
    "DeepSeek": ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "Command": ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
    "Granite": ("<|start_of_role|>", "<|end_of_role|>"),
    "Kimi": ("<|im_user|>", "<|im_middle|>"),
    "GLM": ("[gMASK]", "<sop>", "<|observation|>"),
    "Seed": ("<seed:bos>", "<seed:eos>"),
}


@pytest.mark.parametrize("family", TURNS)
def test_markers_of_turns_are_told_in_the_order_of_the_text(family):
    markers = TURNS[family]
    assert turn_markers("Well, " + " it is ".join(markers) + ".") == list(markers)


@pytest.mark.parametrize(
    "text",
    [
        "a | b || c |> d <| e, and x <|> y",
        "if a < b > c: print('<start>')",
        "<b>bold</b> <s>struck</s> <p>a</p> <end>",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "array[INSTANCE], [1, 2], [x](y), <https://example.org>",
        "<think>so</think> <|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>Paris<|END_RESPONSE|>",
        "<seed:think><seed:cot_budget_reflect>so</seed:think> <|begin_of_box|>4<|end_of_box|>",
        '<tool_call>{"name": "f"}</tool_call> [TOOL_CALLS] <|python_tag|> <｜tool▁calls▁begin｜>',
    ],
)
def test_signs_reasoning_and_tools_are_no_markers_of_turns(text):
    assert turn_markers(text) == []


def test_markers_that_the_family_has_in_its_answers_are_none():
    text = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Paris"
    harmony = {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"}
    assert turn_markers(text, harmony) == []
    assert turn_markers(text)[:2] == ["<|channel|>", "<|message|>"]


THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "options", "marker"),
    [
        ("Paris.", {}, None),
        ("<think>so</think>Paris.", {}, None),
        ("<think>so</think>Paris, <think>or</think>not.", {}, None),
        ("so</think>Paris.", {"prompt_end": "user: …<think>\n"}, None),
        ("so", {"prompt_end": "<think>\n", "ended": False}, None),
        ("<think>so", {"ended": False}, None),
        ("<think>so", {}, "<think>"),
        ("so", {"prompt_end": "<think>\n"}, "<think>"),
        ("so</think>Paris.", {}, "</think>"),
        ("<think>a</think>b</think>", {}, "</think>"),
        ("<think>a<think>b</think>", {}, "<think>"),
        ("<think>so</think>", {"prompt_end": "<think>\n"}, "<think>"),
        ("<think>so[/THINK]Paris.", {}, "[/THINK]"),
        ("so</thinking>Paris.", {"prompt_end": "<think>\n"}, "</thinking>"),
        ("<|start_think|>so<|end_think|>Paris.", {}, None),
        ("<|start_think|>so<|end_think|>Paris.", {"parts": THINK}, "<|start_think|>"),
        ("<reasoning>so</reasoning>4", {"parts": THINK, "prompt": "Think in <reasoning> first."}, None),
        ("◁think▷so◁/think▷Paris", {"parts": ("◁think▷", "◁/think▷")}, None),
    ],
)
def test_markers_of_reasoning_have_a_partner_of_their_family(text, options, marker):
    assert unbalanced_marker(text, **{"ended": True, **options}) == marker


HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


@pytest.mark.parametrize(
    ("text", "ended", "marker"),
    [
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Paris", True, None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", True, None),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>", False, None),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>fi", False, None),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>", True, "<|channel|>"),
        ("<|channel|>so it is Paris", True, "<|channel|>"),
        ("<|channel|>thoughts<|message|>so", True, "<|channel|>"),
    ],
)
def test_a_channel_has_a_name_and_a_message(text, ended, marker):
    assert unbalanced_marker(text, ended=ended, parts=HARMONY) == marker
