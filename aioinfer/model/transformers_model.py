"""TransformersLM: any other causal LM of transformers, over paged KV.

transformers can replace a model's attention by name. The replacement here takes packed rows, so one forward
of shape [1, T] computes a whole step. :mod:`aioinfer.model.selfcheck` verifies at load that the model really
calls it, needs no feature that it lacks, and keeps no state or positions of its own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aioinfer.checkpoint.files import Directory
from aioinfer.checkpoint.libraries import importing_transformers
from aioinfer.checkpoint.tensors import Tensors
from aioinfer.config.values import first_line
from aioinfer.errors import ConfigError
from aioinfer.model.adapters.modules import adapt_modules, watch_modules
from aioinfer.model.attention.base import Attention, AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.batch import Batch
from aioinfer.model.kernels import make_adapters
from aioinfer.model.multimodal import WRAPPERS
from aioinfer.model.rope import factors, longest
from aioinfer.model.selfcheck import FEW, TOLERANCE, Steps, check_cache, check_paged, record, sample, steps
from aioinfer.model.shallow import block_size, kinds, shallow
from aioinfer.model.spec import ModelSpec, Progress, eos_token_ids
from aioinfer.model.vision.base import Encoder
from aioinfer.model.weights import RandomWeights

if TYPE_CHECKING:
    from aioinfer.model.spec import Recipe

__all__ = [
    *("PAGED", "Attend", "TransformersLM", "attending", "loaded", "paged", "quiet", "random_model"),
    "register",
]

#: name of the attention over pages
PAGED = "aioinfer_paged"
#: name of the attention of the self-check: with it, transformers also makes masks, which state the windows
_PROBE = "aioinfer_probe"

#: what can be done about a model that is refused
_HELP = "; docs/models.md has the models that run"
#: ids with which the self-check is tried
_ATTEMPTS = 3
#: tokens of its first chunk beyond the longest block
_MARGIN = 8

#: ``attend`` is the attention of the forward that runs on this thread: a function of one layer's
#: (module, query, key, value, attention_mask, options)
_local = threading.local()
Attend: TypeAlias = Callable[..., torch.Tensor]


class TransformersLM:
    """A :class:`~aioinfer.model.spec.CausalLM` of transformers' code."""

    capturable = False
    invariant = False
    seconds: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        path: Path,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        random_weights: RandomWeights | None = None,
        tensors: Tensors | None = None,
        max_lora_rank: int = 0,
    ) -> None:
        """``random_weights`` replace the checkpoint's, and so do ``tensors``; ``max_lora_rank``: of adapters,
        0 for none. Raises ConfigError if transformers cannot load the whole model, or if its logits over
        paged KV differ from those of its own attention."""
        architecture = config.architectures[0]
        self.updates: Recipe | None = None
        self.encoder: Encoder | None = None
        _refuse_unknown(architecture, config.model_type)
        register()
        progress = progress or (lambda stage, done, total: None)
        progress("weights", 0, 1)
        if random_weights is None:
            self._model = loaded(path, dtype, config, tensors).eval().to(device)
        else:
            self._model = random_model(config, dtype, device, random_weights)
        progress("weights", 1, 1)
        self.adapters = make_adapters(dtype, device, max_lora_rank, triton=False)
        self.adapter_reason = "" if self.adapters else "max_lora_rank is 0"
        for parameter in ("position_ids", "logits_to_keep"):
            # Other models count positions themselves and ignore this argument among their keyword arguments.
            if parameter not in inspect.signature(self._model.forward).parameters:
                raise ConfigError(
                    f"model: {architecture} of transformers takes no {parameter}, without which it cannot "
                    f"compute several sequences in one forward{_HELP}"
                )
        #: hidden states [1, T, hidden] of the forward that runs, after the last norm
        self._hidden: torch.Tensor | None = None
        self._shows_hidden = False
        self.classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
        # What is around a decoder may pass it by.
        for part in {self._model.base_model, self._model.get_decoder()} - {self._model, None}:
            part.register_forward_hook(self._keep_hidden)
        layers = self._checked(architecture, device)
        text = config.get_text_config()
        output = self._model.get_output_embeddings()
        self.spec = ModelSpec(
            architecture=architecture,
            num_layers=len(layers),
            kv_layers=tuple(layers),
            hidden_size=self._model.get_input_embeddings().weight.shape[1],
            vocab_size=text.vocab_size if output is None else output.weight.shape[0],
            max_model_len=_max_model_len(text, architecture),
            dtype=dtype,
            eos_token_ids=eos_token_ids(Directory(path).generation_config(), text),
            num_parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            hidden_states=self._shows_hidden,
            rotary_factors=factors(text),
        )

    def state(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the model, by the names that transformers has for them; as they are computed
        with."""
        state: Mapping[str, torch.Tensor] = self._model.state_dict()
        return state

    def _keep_hidden(self, module: Any, inputs: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
            self._hidden, self._shows_hidden = hidden, True

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        attend = paged(batch, attention)
        tokens = batch.input_ids, batch.positions, batch.logits_rows
        if self.adapters is None or batch.adapter_slots is None:
            logits = self._run(*tokens, attend)
        else:
            with self.adapters.computing(batch):
                logits = self._run(*tokens, attend)
        hidden, self._hidden = self._hidden, None
        if batch.hidden_rows is not None:
            assert hidden is not None, "a model without hidden states is not asked for any"
            batch.hidden = hidden[0, batch.hidden_rows].float()
        return logits

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """Logits [S, vocab_size] of the tokens ``rows`` [S], from ids and positions [T]."""
        with attending(attend):
            logits: torch.Tensor = self._output(ids, positions, rows).logits[0]
        return logits

    def _output(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *, use_cache: bool = False
    ) -> Any:
        return self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=use_cache, logits_to_keep=rows
        )

    def _checked(self, architecture: str, device: torch.device) -> list[KVShape]:
        """The keys of all layers. Raises ConfigError, whatever the model raises, if it does not run here."""
        what = f"model: the code of {architecture} in transformers fails over paged KV"
        try:
            with _blaming(what, typed=True):
                return self._check(device)
        except ConfigError as error:
            raise ConfigError(f"{error}{_HELP}") from error

    @torch.no_grad()
    def _check(self, device: torch.device) -> list[KVShape]:
        """Run the model with its own attention, with the recording one, and over pages; see
        :mod:`aioinfer.model.selfcheck`."""
        with importing_transformers():
            from transformers import Cache

        model, name = self._model, type(self._model).__name__
        vocab_size = model.get_input_embeddings().weight.shape[0]
        model.set_attn_implementation("eager")
        prompts = sample(FEW, vocab_size, 0, device)
        with watch_modules(model) as calls:
            outputs = [self._output(ids, *_places(ids), use_cache=True) for ids in prompts]
        check_cache(name, next((each for each in outputs[0].values() if isinstance(each, Cache)), None))
        expected = [output.logits[0] for output in outputs]
        if not all(bool(logits.isfinite().all()) for logits in expected):
            raise ConfigError(
                f"model: the logits of {name} are not finite in {model.dtype}; try another dtype"
            )
        if self.adapters is not None:
            adapt_modules(model, self.adapters, calls, [len(ids) for ids in prompts])
        model.set_attn_implementation(_PROBE)
        num_layers = model.config.get_text_config().num_hidden_layers
        layers = record(name, num_layers, lambda watch: self._alone(prompts[0], watch))
        if model.dtype != torch.float32:
            # What is rounded is not judged, but it has to run.
            model.set_attn_implementation(PAGED)
            check_paged(self.forward, layers, prompts, expected, model.dtype, FEW)
        error = self._difference(layers, vocab_size, device)
        if error > TOLERANCE:
            raise ConfigError(
                f"model: {name} cannot run over paged KV: in chunks and decodes its logits differ by "
                f"{error:.2g} of their spread from its own attention over the whole sequence"
            )
        return layers

    def _difference(self, layers: list[KVShape], vocab_size: int, device: torch.device) -> float:
        """How much logits over pages differ from those of whole sequences, without rounding."""
        model = self._model
        taken, error = steps(block_size(model) + _MARGIN), 1.0
        # Two experts can have scores that are equal but for rounding: hardly so with other ids, too.
        for attempt in range(_ATTEMPTS):
            prompts = sample(taken, vocab_size, attempt, device)
            try:
                error = self._compare(layers[: kinds(model)], prompts, taken)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # some cannot compute a part of their layers
                error = self._compare(layers, prompts, taken)
            if error <= TOLERANCE:
                break
        return error

    def _compare(self, layers: list[KVShape], prompts: list[torch.Tensor], taken: Steps) -> float:
        model = self._model
        with shallow(model, len(layers)):
            model.set_attn_implementation("eager")
            expected = [self._alone(ids) for ids in prompts]
            model.set_attn_implementation(PAGED)
            return check_paged(self.forward, layers, prompts, expected, torch.float32, taken)

    def _alone(self, ids: torch.Tensor, attend: Attend | None = None) -> torch.Tensor:
        """Logits [T, vocab_size] of a whole sequence [T]."""
        return self._run(ids, *_places(ids), attend)


def _places(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions of a whole sequence, and the rows of its tokens."""
    positions = torch.arange(len(ids), device=ids.device)
    return positions, positions


def paged(batch: Batch, attention: Attention, block: int = 1) -> Attend:
    """The attention of a step over its pages. ``block``: as of AttentionParams."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, options: Any
    ) -> torch.Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        params = AttentionParams(scale, options.get("sliding_window"), options.get("softcap"), block)
        return attention(module.layer_idx, q, k, v, batch, params, options.get("s_aux"))[None]

    return attend


@contextlib.contextmanager
def attending(attend: Attend | None) -> Iterator[None]:
    """Forwards of transformers on this thread attend with this, if their model was told to."""
    _local.attend = attend
    try:
        yield
    finally:
        _local.attend = None


def _refuse_unknown(architecture: str, kind: str) -> None:
    with importing_transformers():
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known.update((names,) if isinstance(names, str) else names)
    if architecture not in known:
        more = ""
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
            more = f"; if it is computed as {causal}, architectures in config.json has to say so"
        if architecture.endswith("ForConditionalGeneration"):
            more = f"; of models with more than text, the text part of {', '.join(WRAPPERS)} can be loaded"
        raise ConfigError(f"model: {architecture} is no causal language model of transformers{more}")


def loaded(
    path: Path,
    dtype: torch.dtype,
    config: Any,
    tensors: Tensors | None,
    kind: Any = None,
    *,
    optional: str = "\0",
) -> Any:
    """The model of a directory; of ``tensors``, if given, one of the config instead. Raises ConfigError.

    Args:
        kind: a class of transformers; None for AutoModelForCausalLM.
        optional: prefix of the tensors that may be missing.
    """
    with importing_transformers():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind = kind or AutoModelForCausalLM
    options: dict[str, Any] = {
        "dtype": dtype,
        "use_safetensors": True,
        "attn_implementation": "eager",
        "output_loading_info": True,
        # The report below names them, and they raise.
        "ignore_mismatched_sizes": True,
    }
    with _blaming(f"model: transformers cannot load {path.name}"), quiet():
        if tensors is None:
            model, report = kind.from_pretrained(
                path, config=config, local_files_only=True, trust_remote_code=False, **options
            )
        else:
            config = copy.copy(config)
            # Its weights are not quantised any more.
            config.quantization_config = None
            state = {name: _narrow(tensors.read(name), dtype) for name in tensors.names}
            model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None, config=config, state_dict=state, **options
            )
    # transformers initializes missing tensors at random, and only logs it.
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(optional))
    if missing:
        raise ConfigError(f"model: the checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    unexpected = [] if tensors is None else sorted(report["unexpected_keys"])
    # Tools that quantise write biases of zeros for every layer.
    unexpected = [name for name in unexpected if not name.endswith(".bias") or bool(state[name].any())]
    if unexpected:
        raise ConfigError(
            f"model: the checkpoint has {len(unexpected)} unexpected tensors, first {unexpected[0]}"
        )
    mismatched = sorted(report["mismatched_keys"], key=str)
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise ConfigError(f"model: {name} is shaped {tuple(stored)}, the config says {tuple(wanted)}")
    return model


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix in the model's type, as soon as it is read: what is dequantised is of float32."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 and tensor.dim() > 1 else tensor


def random_model(
    config: Any, dtype: torch.dtype, device: torch.device, weights: RandomWeights, kind: Any = None
) -> Any:
    """transformers' model of a config, with random weights, made on the device. Raises ConfigError."""
    with importing_transformers():
        from transformers import AutoModelForCausalLM

    with _blaming(f"model: transformers cannot make a {config.architectures[0]}"), device:
        model = (kind or AutoModelForCausalLM).from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights.fill(name, parameter)
    return model.eval()


def _max_model_len(text: Any, architecture: str) -> int:
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        raise ConfigError(f"model: the config of {architecture} has no max_position_embeddings")
    return longest(text)


@contextlib.contextmanager
def _blaming(what: str, *, typed: bool = False) -> Iterator[None]:
    """Raise ConfigError for what the code of a model of transformers raises, which may be anything.
    ``typed``: with the type of the exception."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: " if typed else ""
        raise ConfigError(f"{what}: {said}{first_line(error)}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable the progress bars of transformers: the application decides what to display."""
    with importing_transformers():
        from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def register() -> None:
    """Register both attentions with transformers. ``PAGED`` has no mask function: no mask is made for it."""
    with importing_transformers():
        from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(_PROBE, _attend)
    AttentionMaskInterface.register(_PROBE, _mask_window)


def _mask_window(
    *args: Any, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any
) -> torch.Tensor:
    """The length of a mask's window, 0 for none, instead of the mask; -1 if a token sees others than those
    before it and itself, or than a window of them (both directions, blocks): float64 [1, 1, 1, 1]."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(*(torch.tensor(index) for index in (0, 0, query, key))))

    window = local_size or 0
    far = window or 2
    plain = sees(far, far) and sees(far, 1) and sees(far, 0) == (not window) and not sees(0, 1)
    return torch.tensor(window if plain else -1, dtype=torch.float64).view(1, 1, 1, 1)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention that transformers calls, with query [1, num_heads, T, head_dim] and key and value
    [1, num_kv_heads, T, head_dim].

    Returns [1, T, num_heads, head_dim] and no weights.
    """
    return _local.attend(module, query, key, value, attention_mask, options), None
