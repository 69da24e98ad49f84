"""Factorized layers through `save_pretrained` and `from_pretrained` of transformers.

transformers makes a model from its config, and lets a "quantizer" named in the config change the layers before the
weights are read. Ours factorizes them as the config says.
"""

import functools
import re
import sys

from torch import Tensor, nn

from fastfact.nn import files
from fastfact.nn.convert import factorized_layers, when_factorized

_METHOD = "fastfact"


def register_transformers() -> None:
    """Let `from_pretrained` of transformers read models with factorized layers; to be called once, before it.

    `ff.factorize` does so itself for a model of transformers, whose `save_pretrained` then writes the specs into
    config.json. Where nothing was registered, `from_pretrained` raises: it finds an empty `weight` for every factorized
    layer. Raises ImportError where transformers is not installed.
    """
    _quantizer()


def remember(model: nn.Module) -> None:
    """Have `save_pretrained` of every transformers model in `model` write how its layers are factorized."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    for module in model.modules():
        if isinstance(module, modeling.PreTrainedModel) and getattr(module, "hf_quantizer", None) is None:
            quantizer, config = _quantizer()
            module.hf_quantizer = quantizer(config())


when_factorized.append(remember)


@functools.cache
def _quantizer() -> tuple[type, type]:
    """The classes that transformers asks for, made where it is there."""
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_METHOD)
    class FastfactConfig(QuantizationConfigMixin):
        def __init__(self, layers=None, quant_method=_METHOD, **kwargs):
            self.quant_method, self.layers = quant_method, layers or {}

    @register_quantizer(_METHOD)
    class FastfactQuantizer(HfQuantizer):
        requires_calibration = False
        is_trainable = is_qat_trainable = is_compileable = True

        def is_serializable(self, *args, **kwargs) -> bool:
            return True

        def _process_model_before_weight_loading(self, model, **kwargs):
            layers = self.quantization_config.layers
            files.shape_as(model, layers)
            marks = [rf"^{re.escape(path)}\.weight$" for path in layers]
            known = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
            model._keys_to_ignore_on_load_unexpected = {*known, *marks}

        def _process_model_after_weight_loading(self, model, **kwargs):
            # To transformers the model is not quantized: it may be cast, moved and trained as any other.
            model.is_quantized = False
            del model.quantization_method, model.config.quantization_config
            for module in model.modules():
                if hasattr(module, "config"):
                    module.config._is_quantized = False
            return model

        def get_state_dict_and_metadata(self, model) -> tuple[dict[str, Tensor] | None, dict]:
            layers = files.specs_of(model)
            if not layers:
                model.config.__dict__.pop("quantization_config", None)
                return None, {}
            model.config.quantization_config = FastfactConfig(layers)
            marks = {
                f"{path}.weight": next(iter(layer.factors().values())).new_empty(0)
                for path, layer in factorized_layers(model).items()
            }
            return model.state_dict() | marks, {}

    return FastfactQuantizer, FastfactConfig
