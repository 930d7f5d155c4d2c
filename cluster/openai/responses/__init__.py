"""`POST /v1/responses`: the same chats in OpenAI's newer shape, without state on the server."""
