"""Convert chat messages to tokens and back, in the chat format of each model family."""

from planish.renderers.datums import conversation_to_datum, datum_from_weights
from planish.renderers.messages import (
    Content,
    ContentPart,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    get_text_content,
)
from planish.renderers.recommend import recommended_renderer_name
from planish.renderers.registry import FORMATS, get_renderer
from planish.renderers.renderer import Renderer
from planish.renderers.termination import ParsedResponse, Termination
from planish.renderers.train_on import TrainOnWhat

__all__ = [
    "FORMATS",
    "Content",
    "ContentPart",
    "ImagePart",
    "Message",
    "ParsedResponse",
    "Renderer",
    "Termination",
    "TextPart",
    "ThinkingPart",
    "ToolCall",
    "ToolSpec",
    "TrainOnWhat",
    "UnparsedToolCall",
    "conversation_to_datum",
    "datum_from_weights",
    "get_renderer",
    "get_text_content",
    "recommended_renderer_name",
]
