"""TRL's training templates: patched chat templates of well-known model families, for tokenizers whose own one cannot serve in training."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What rendering may raise: the template on purpose, or its code by mistake."""


def with_training_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """A copy of the tokenizer that carries TRL's training template of its family; None where TRL has none, or the own one is enough for it.

    TRL knows a family by the text of its chat template. Its `{% generation %}` markers render as nothing.
    """
    from trl.chat_template_utils import get_training_chat_template

    try:
        template = get_training_chat_template(tokenizer)
    except TEMPLATE_FAULTS:     # ValueError: a family that TRL does not know; others: a template that its own probes cannot render
        return None
    if template is None:
        return None
    own = tokenizer.chat_template
    patched = deepcopy(tokenizer)
    patched.chat_template = {**own, "default": template} if isinstance(own, dict) else template
    return patched
