"""Between text and tokens: the tokenizer, chat templates, and text as it grows."""
