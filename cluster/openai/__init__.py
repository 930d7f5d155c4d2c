"""OpenAI's protocol: fields, their one validator, calls, choices, and answers as JSON and SSE. It knows no HTTP."""
