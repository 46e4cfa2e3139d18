"""From a base model to one that answers: what fine-tuning needs besides the trainer."""

from zero2all.align.inspect import InspectedConversation, inspect_conversations

__all__ = ["InspectedConversation", "inspect_conversations"]
