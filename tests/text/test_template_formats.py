"""Parsers that follow from a chat template: the formats that it writes itself."""

from __future__ import annotations

import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.text import reasoning, tool_calls
from aioinfer.text.reasoning import REASONING_PARSERS, DeepSeekR1, Qwen3
from aioinfer.text.tool_calls import (
    Apriel,
    DeepSeekV3,
    DeepSeekV4,
    DeepSeekV31,
    DeepSeekV32,
    Functools,
    Gemma4,
    Glm45,
    Granite,
    Harmony,
    Hermes,
    KimiK2,
    Lfm2,
    Llama3,
    MinimaxM2,
    Mistral,
    MistralV11,
    Nemotron,
    Pythonic,
    Qwen3Coder,
    SeedOss,
)
from tests.toys import ToyTokenizer

#: parts of templates as models have them
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>{% endfor %}"
HERMES = PLAIN + "{{ '<tool_call>\\n{\"name\": \"' + tool.name + '\", \"arguments\": ' }}{{ '</tool_call>' }}"
#: the same tags with something else between them: Qwen3-Coder and Qwen 3.5, GLM
CODER = PLAIN + "{{ '<tool_call>\\n<function=' + tool.name + '>\\n<parameter=' }}{{ '</tool_call>' }}"
GEMMA = PLAIN + "{{ '<|tool_call>call:' + function['name'] + '{' }}{{ '}<tool_call|>' }}"
GLM = PLAIN + "{{ '<tool_call>' + tool.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ '</tool_call>' }}"
SEED = PLAIN + "{{ '<seed:tool_call>\\n<function=' + tool.name + '>\\n<parameter=' }}</seed:tool_call>"
MINIMAX = PLAIN + "<minimax:tool_call>{{ '<invoke name=\"' + tool.name + '\">' }}</minimax:tool_call>"
LLAMA = (
    PLAIN + '{{ \'Respond in the format {"name": function name, "parameters": dictionary of names.\' }}'
    "{{ '{\"name\": \"' + tool_call.name + '\", ' }}{{ '\"parameters\": ' }}{{ tool_call.arguments }}"
)
MISTRAL = PLAIN + "{{ '[TOOL_CALLS] [' }}{{ tool_call.function | tojson }}{{ ']' }}"
MISTRAL_V11 = PLAIN + "{{ '[TOOL_CALLS]' }}{{ name + '[CALL_ID]' + id + '[ARGS]' + arguments }}"
#: tools are written as JSON, and calls in another format
DECLARING = PLAIN + "{{ '{\"name\": ' + t.name + '\"description\": ' + t.description + '\"parameters\": ' }}"
#: lists of calls; the instruction of one of them names the tags of another format, too
GRANITE = PLAIN + "{{ 'respond with <|tool_call|> followed by a JSON list' }}{{ tools | tojson }}"
APRIEL = (
    PLAIN + '{{ \'Write JSON within <tool_call></tool_call>: <tool_calls>[{"name": N, "arguments": A}]\' }}'
)
NEMOTRON = PLAIN + "{{ '<TOOLCALL>[{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{ ']</TOOLCALL>' }}"
FUNCTOOLS = PLAIN + '{{ \'as functools[{"name": N, "arguments": A}]\' }}'
#: within a Jinja string, as SmolLM3's
SMOL = PLAIN + r'{{ "<tool_call>\n{\"name\": N, \"arguments\": A}\n</tool_call>" }}'
GPT_OSS = (
    PLAIN + "{{ '<|start|>assistant to=' + name + '<|channel|>commentary json<|message|>' }}{{ '<|call|>' }}"
)
MAGISTRAL = PLAIN + "{{ 'Think first: [THINK]Your thoughts[/THINK]Here, the response.' }}"
DEEPSEEK = PLAIN + "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n' + arguments }}"
DEEPSEEK_V31 = PLAIN + "{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}"
#: the tags are put together
DSML = PLAIN + "{% set token = '｜DSML｜' %}{{ '<' + token + 'invoke name=' + name }}{{ '<' + token + '"
#: LFM2's templates only tell the model of its tools
LFM2 = PLAIN + "{{ 'List of tools: [' + tools | tojson + ']' }}"
PYTHONIC = PLAIN + "{{ 'Respond as [func_name1(params_name1=params_value1), func_name2(params)]' }}"
KIMI = PLAIN + "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>"
THINKING = (
    PLAIN + "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
)
#: what tells the formats of reasoning of other models
THINKING_OTHERWISE = {
    "seed-oss": "{%- set think_end_token = '</seed:think>' %}",
    "minimax-m3": "{%- set think_end_token = '</mm:think>' %}",
    "hunyuan-v3": "{%- set HYTK = ':opensource' %}{%- set think_end_token = '</think{}>'.format(HYTK) %}",
    "hunyuan-a13b": THINKING + "{% set content = content.split('<answer>')[-1] %}",
    "ernie45": "{{ 'Write your thoughts in <think></think> and the response in <response></response>.' }}",
    "granite": "{{ \"Write after 'Here is my thought process:' and after 'Here is my response:'.\" }}",
    "apriel": "{{ 'Give the answer as [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE].' }}",
    "apertus": "{%- set inner_token = '<|inner_prefix|>', outer_token = '<|inner_suffix|>' -%}",
    "solar": "{{ '<|begin|>assistant<|think|>' + message.reasoning + '<|end|>' }}",
    "kimi-k3": "{{- '<|open|>' + tag -}}{%- endmacro -%}{{- open_tag('think') -}}",
    "cohere": "<|START_THINKING|>{{ message.tool_plan }}<|END_THINKING|>",
}


CALLS = [
    (PLAIN, None),
    (HERMES, Hermes),
    (CODER, Qwen3Coder),
    (CODER + HERMES, Qwen3Coder),
    (GLM, Glm45),
    (SEED, SeedOss),
    (MINIMAX, MinimaxM2),
    (GEMMA, Gemma4),
    (THINKING, None),
    (LLAMA, Llama3),
    (MISTRAL, Mistral),
    (MISTRAL_V11, MistralV11),
    (DECLARING, None),
    (GPT_OSS, Harmony),
    (DEEPSEEK, DeepSeekV3),
    (DEEPSEEK_V31, DeepSeekV31),
    (DSML + "function_calls>' }}", DeepSeekV32),
    (DSML + "tool_calls>' }}", DeepSeekV4),
    (KIMI, KimiK2),
    (LFM2, Lfm2),
    (PYTHONIC, Pythonic),
    (GRANITE, Granite),
    (APRIEL, Apriel),
    (NEMOTRON, Nemotron),
    (FUNCTOOLS, Functools),
    (SMOL, Hermes),
]


@pytest.mark.parametrize(("template", "parser"), CALLS)
def test_calls_are_read_in_the_format_that_the_template_writes(
    template: str, parser: type[Hermes] | None
) -> None:
    assert tool_calls.parser_of("auto", [PLAIN, template]) is parser
    assert tool_calls.parser_of("hermes", [template]) is Hermes
    assert tool_calls.parser_of(None, [template]) is None


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (PLAIN, None),
        (THINKING, Qwen3),
        (MAGISTRAL, reasoning.Mistral),
        (GPT_OSS, reasoning.Harmony),
        *((text, REASONING_PARSERS[name]) for name, text in THINKING_OTHERWISE.items()),
        (f"{THINKING}{{{{ '<minimax:tool_call>' }}}}{{{{ '<response>' }}}}", Qwen3),
    ],
)
def test_reasoning_is_split_off_where_the_template_knows_it(
    template: str, parser: type[reasoning.ReasoningParser] | None
) -> None:
    assert reasoning.parser_of("auto", [template]) is parser
    assert reasoning.parser_of("deepseek-r1", [PLAIN]) is DeepSeekR1
    assert reasoning.parser_of(None, [template]) is None


def test_a_server_takes_the_formats_of_its_model_unless_told_otherwise() -> None:
    tokenizer = ToyTokenizer()
    assert ChatFormat.of(tokenizer, "auto", "auto").tools is None
    tokenizer.chat_templates = (HERMES, THINKING)
    found = ChatFormat.of(tokenizer, "auto", "auto")
    assert (found.tools, found.reasoning) == (Hermes, Qwen3)
    told = ChatFormat.of(tokenizer, None, "deepseek-r1")
    assert (told.tools, told.reasoning) == (None, DeepSeekR1)
    assert ChatFormat.of(None, "auto", "auto").tools is None
