"""Anthropic's Messages API as the chat that it is: fields, messages, answers. It knows no HTTP."""
