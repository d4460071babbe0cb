"""Fields: every field of a request body, and what the server does with it.

:mod:`aioinfer.chat.fields` has the rules and the objects within a chat. ``docs/fields.md`` is generated from
all tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aioinfer import plugins
from aioinfer.chat import fields as chat
from aioinfer.chat.fields import Harmless, Honoured, Table, Unsupported
from aioinfer.chat.schemas import (
    ANY,
    FLAG,
    OBJECT,
    TEXT,
    Schema,
    array,
    choice,
    closed,
    diffusion,
    either,
    integer,
    of_param,
    text,
)
from aioinfer.chat.tools import MAX_TOOLS
from aioinfer.loop.options import MAX_LABEL
from aioinfer.params import BOUNDS
from aioinfer.server.openai.extras import MAX_TOKENS
from aioinfer.server.openai.prediction import PREDICTION

__all__ = ["CHAT", "COMPLETION", "MAX_CHOICES", "NESTED", "REQUEST_ID", "TOKENS", "VERBOSITIES"]

#: choices of one call: prompts x n
MAX_CHOICES = 128
#: what a client can choose as the second half of an answer's id
REQUEST_ID = "[A-Za-z0-9._:-]{1,128}"
#: Of ``verbosity``, a wish that no chat template reads. Clients send it on their own with some models' names.
VERBOSITIES = ("low", "medium", "high")

_SCHEMA = either(OBJECT, FLAG, TEXT)
_LABEL = text(0, MAX_LABEL)
_SECONDS = {"type": "number", "exclusiveMinimum": 0}
_IDS = array(integer(0, 2**31 - 1), 1)
_PROMPT = either(text(1), _IDS, array(either(text(1), _IDS), 1, MAX_CHOICES))
_OFF = Unsupported((False,))
_NO = Unsupported()
_ZERO = Unsupported((0,))
_ONE = Unsupported((1,))
_BOOKKEEPING = Harmless("the client's bookkeeping")
_TEMPLATE = Unsupported((), "use chat_template_kwargs, if the model's template has such a variable")

_SAMPLING: Table = {
    **{
        name: Honoured("as in `SamplingParams`", name)
        for name in (
            *(
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                *plugins.names(plugins.FILTERS),
                "seed",
                "max_tokens",
            ),
            *("min_tokens", "stop", "stop_regex", "stop_token_ids", "ignore_eos", "repetition_penalty"),
            *("presence_penalty", "frequency_penalty", "skip_special_tokens", "logit_bias"),
            *("allowed_token_ids", "bad_words"),
        )
    },
    "max_completion_tokens": Honoured("OpenAI's newer name of `max_tokens`", "max_tokens"),
    "include_stop_str_in_output": Honoured("`include_stop` of `SamplingParams`", "include_stop"),
}

_GRAMMARS: Table = {
    "response_format": Honoured("JSON, or an instance of a JSON schema"),
    "structured_outputs": Honoured("vLLM's object of one constraint"),
    "guided_json": Honoured("an instance of this JSON schema", schema=_SCHEMA),
    "guided_json_object": Honoured("any JSON object", schema=FLAG),
    "guided_regex": Honoured("a match of this regular expression", schema=TEXT),
    "guided_choice": Honoured("one of these texts", schema=either(array(TEXT, 1), TEXT)),
    "guided_grammar": Honoured("a text of this grammar, in Lark or GBNF", schema=TEXT),
    "json_schema": Honoured("SGLang's name of `guided_json`", schema=_SCHEMA),
    "regex": Honoured("SGLang's name of `guided_regex`", schema=TEXT),
    "ebnf": Honoured("SGLang's name of `guided_grammar`", schema=TEXT),
    "grammar": Honoured("llama.cpp's name of `guided_grammar`", schema=TEXT),
    "guided_decoding_backend": Harmless("which library enforces a grammar"),
    "guided_whitespace_pattern": _NO,
}

_COMMON: Table = {
    **_SAMPLING,
    **_GRAMMARS,
    "model": Honoured("name of the served model (the default), or of an adapter", schema=TEXT),
    "n": Honoured("choices per prompt", schema=integer(1, MAX_CHOICES)),
    "stream": Honoured("server-sent events", schema=FLAG),
    "stream_options": Honoured("what a stream includes"),
    "diffusion": Honoured("how a diffusion model denoises", schema=diffusion()),
    "priority": Honoured("see scheduling", schema=integer(-(2**31), 2**31 - 1)),
    "cache_salt": Honoured("see scheduling", schema=_LABEL),
    "routing_key": Honoured("see scheduling", schema=_LABEL),
    "prompt_cache_key": Honoured("`routing_key`, unless that is given", schema=_LABEL),
    "request_id": Honoured(
        "the second half of the answer's `id`; 1 to 128 letters, digits, `.`, `_`, `:`, `-`",
        schema=text(pattern=REQUEST_ID),
    ),
    # vLLM's and SGLang's
    "max_new_tokens": Honoured("SGLang's and Hugging Face's name of `max_tokens`", "max_tokens"),
    "min_new_tokens": Honoured("SGLang's and Hugging Face's name of `min_tokens`", "min_tokens"),
    "n_predict": Honoured(
        "llama.cpp's name of `max_tokens`; -1: no limit",
        "max_tokens",
        schema=either(choice(-1), of_param("max_tokens")),
    ),
    "random_seed": Honoured("Mistral's name of `seed`", "seed"),
    "prompt_logprobs": Honoured(
        "the answer has the logprobs of the prompt, with so many likely alternatives; not streamed",
        "prompt_logprobs",
    ),
    "logprob_start_len": Honoured(
        "SGLang's name of the first token of the prompt that has a logprob; those before it have null",
        "logprob_start_len",
    ),
    "return_token_ids": Honoured("choices have `token_ids`, and the answer `prompt_token_ids`", schema=FLAG),
    "return_tokens_as_token_ids": Honoured("logprobs name tokens as `token_id:5`", schema=FLAG),
    "prediction": Honoured(
        "OpenAI's object of what the answer is expected to be: as far as it is, it comes sooner, and `usage` "
        "counts how many tokens of it were",
        "prediction",
        schema=PREDICTION,
    ),
    "speculate": Honoured("false: nothing is drafted; the answer is the same", "speculate"),
    "add_special_tokens": Honoured(
        "the special tokens that the model expects around a text; by default added to a text prompt and not "
        "to a chat, whose template has them. Token ids are taken as they are",
        schema=FLAG,
    ),
    "truncate_prompt_tokens": Honoured(
        "only so many tokens of the prompt's end are kept; not with `echo`", schema=integer(1)
    ),
    "waiting_timeout": Honoured("seconds until the first step; at most the server's own", schema=_SECONDS),
    "running_timeout": Honoured("seconds from the first step on; at most the server's own", schema=_SECONDS),
    "max_lag": Honoured(
        "unread tokens beyond which nothing more is computed; at most the server's own", schema=integer(1)
    ),
    # accepted
    "user": _BOOKKEEPING,
    "safety_identifier": _BOOKKEEPING,
    "metadata": _BOOKKEEPING,
    "prompt_cache_retention": Harmless("how long a prefix stays cached"),
    "keep_alive": Harmless("how long a model stays loaded"),
    # OpenAI's
    "store": Unsupported((False,), "nothing is stored"),
    "service_tier": Unsupported(("auto", "default")),
    "functions": Unsupported(([],), "use tools"),
    "function_call": Unsupported(("none", "auto"), "use tool_choice"),
    "web_search_options": _NO,
    "verbosity": Unsupported(VERBOSITIES),
    "modalities": Unsupported((["text"],)),
    "audio": _NO,
    # vLLM's and SGLang's
    "use_beam_search": _OFF,
    "length_penalty": _ONE,
    "early_stopping": _OFF,
    "spaces_between_special_tokens": Unsupported((True,)),
    "return_hidden_states": _OFF,
    "prompt_embeds": _NO,
    "input_embeds": _NO,
    "kv_transfer_params": Unsupported(({},)),
    "vllm_xargs": Unsupported(({},)),
    "logits_processors": Unsupported(([],)),
    "custom_logit_processor": _NO,
    "lora_path": _NO,
    "session_params": Unsupported(({},)),
    "no_stop_trim": Unsupported((False,), "use include_stop_str_in_output"),
    "thinking_token_budget": _NO,
    # sampling of other engines
    "typical_p": _ONE,
    "tfs_z": _ONE,
    "top_a": _ZERO,
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "no_repeat_ngram_size": _ZERO,
    "encoder_repetition_penalty": _ONE,
    "repeat_penalty": Unsupported((1,), "use repetition_penalty"),
    "repeat_last_n": Harmless("has an effect with `repeat_penalty` only"),
    "penalize_nl": _OFF,
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "mirostat_tau": Harmless("has an effect with `mirostat` only"),
    "mirostat_eta": Harmless("has an effect with `mirostat` only"),
    "dry_multiplier": _ZERO,
    "dry_base": Harmless("has an effect with `dry_multiplier` only"),
    "dry_allowed_length": Harmless("has an effect with `dry_multiplier` only"),
    "dry_penalty_last_n": Harmless("has an effect with `dry_multiplier` only"),
    "dry_sequence_breakers": Harmless("has an effect with `dry_multiplier` only"),
    "xtc_probability": _ZERO,
    "xtc_threshold": Harmless("has an effect with `xtc_probability` only"),
    "dynatemp_range": _ZERO,
    "dynatemp_exponent": Harmless("has an effect with `dynatemp_range` only"),
    "smoothing_factor": _ZERO,
    "samplers": _NO,
    "do_sample": Unsupported((True,), "use temperature 0"),
    "min_length": Unsupported((0,), "use min_tokens"),
    "max_length": Unsupported((), "use max_tokens"),
    "n_keep": _ZERO,
    "n_probs": Unsupported((0,), "use logprobs"),
    "id_slot": Unsupported((-1,)),
    "cache_prompt": Unsupported((True,)),
    "safe_prompt": _OFF,
    "watermark": _OFF,
    "details": _OFF,
    "return_full_text": Unsupported((False,), "use echo"),
    "options": Unsupported(({},)),
    "format": Unsupported((), "use response_format"),
}


def _with_tokens(rule: Any, schema: Schema) -> Honoured:
    """A field for ``max_tokens`` with other bounds."""
    assert isinstance(rule, Honoured)
    return replace(rule, schema=schema)


#: an answer has a token at least; a completion may have none
TOKENS = integer(1, int(BOUNDS["max_tokens"].high))

#: of ``/v1/chat/completions``
CHAT: Table = {
    **_COMMON,
    **{name: _with_tokens(_COMMON[name], TOKENS) for name in MAX_TOKENS},
    "n_predict": _with_tokens(_COMMON["n_predict"], either(choice(-1), TOKENS)),
    "messages": Honoured("the conversation", schema=array(ANY, 1), required=True),
    "logprobs": Honoured("whether logprobs of the tokens are reported", schema=FLAG),
    "top_logprobs": Honoured("with so many likely alternatives", schema=of_param("logprobs")),
    "tools": Honoured("functions that the model may call", schema=array(ANY, 0, MAX_TOOLS)),
    "tool_choice": Honoured(
        "`none`, `auto`, `required`, or one function", schema=choice("none", "auto", "required")
    ),
    "parallel_tool_calls": Honoured("false: one call at most", schema=FLAG),
    "chat_template_kwargs": Honoured(
        "variables of the chat template; one that it does not read is refused", schema=OBJECT
    ),
    "add_generation_prompt": Honoured("false: the prompt ends with the last message", schema=FLAG),
    "continue_final_message": Honoured("the answer continues the last message", schema=FLAG),
    "documents": Honoured("goes to the chat template; refused if that does not read it", schema=ANY),
    "reasoning_effort": Honoured(
        "goes to the chat template; refused if that does not read it. `none` may switch thinking off",
        schema=ANY,
    ),
    "enable_thinking": Honoured("switches thinking on or off, as the chat template can", schema=FLAG),
    "think": Honoured("Ollama's name of `enable_thinking`", schema=FLAG),
    "thinking": Honoured(
        "the same, also as an object", schema=either(FLAG, closed({"type": choice("enabled", "disabled")}))
    ),
    "include_reasoning": Honoured("false: the reasoning is left out of the answer", schema=FLAG),
    "separate_reasoning": Honoured("false: the reasoning stays in the content", schema=FLAG),
    "prompt": Unsupported((), "is for /v1/completions"),
    "suffix": Unsupported(("",)),
    "best_of": _ONE,
    "echo": _OFF,
    "chat_template": _NO,
    "mm_processor_kwargs": Unsupported(({},)),
    "stream_reasoning": Unsupported((True,)),
    "reasoning": _TEMPLATE,
}

#: of ``/v1/completions``
COMPLETION: Table = {
    **_COMMON,
    "prompt": Honoured("text, token ids, or a list of either", schema=_PROMPT, required=True),
    "logprobs": Honoured(
        "logprobs of the tokens with so many likely alternatives", schema=of_param("logprobs")
    ),
    "echo": Honoured("the answer begins with the prompt", schema=FLAG),
    "best_of": Honoured("must equal `n`", schema=integer(1, MAX_CHOICES)),
    "messages": Unsupported((), "is for /v1/chat/completions"),
    "tools": Unsupported(([],), "is for /v1/chat/completions"),
    "tool_choice": Unsupported(("none", "auto"), "is for /v1/chat/completions"),
    "parallel_tool_calls": Unsupported((True, False)),
    "chat_template_kwargs": Unsupported(({},), "is for /v1/chat/completions"),
    "reasoning_effort": Unsupported((), "is for /v1/chat/completions"),
    "top_logprobs": Unsupported((), "use logprobs"),
    "suffix": Unsupported(("",)),
}

#: objects within a body, by their path
NESTED: Mapping[str, Table] = {
    "stream_options": {
        "include_usage": Honoured("token counts as the last event", schema=FLAG),
        "continuous_usage_stats": Honoured(
            "every event has the token counts of its choice so far", schema=FLAG
        ),
        "include_obfuscation": Harmless("padding of events"),
    },
    **chat.NESTED,
}
