"""The table of fields is complete against OpenAI's own client."""

from openai.types import (
    batch_create_params,
    batch_list_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
    file_list_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.docs import api_page


def fields_of(params) -> set[str]:
    streaming = params.CompletionCreateParamsStreaming.__annotations__
    return {*params.CompletionCreateParamsBase.__annotations__, *streaming}


def test_every_field_of_openais_api_is_in_the_table():
    assert fields_of(chat_create_params) == api_page.OPENAI_CHAT
    assert fields_of(completion_create_params) == api_page.OPENAI_COMPLETION
    assert set(embedding_create_params.EmbeddingCreateParams.__annotations__) == api_page.OPENAI_EMBEDDING
    assert {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"} == api_page.OPENAI_RESPONSE


def test_every_field_of_openais_files_and_batches_is_in_the_table():
    assert set(file_create_params.FileCreateParams.__annotations__) == api_page.OPENAI_FILE
    assert set(file_list_params.FileListParams.__annotations__) == api_page.OPENAI_FILE_LIST
    assert set(batch_create_params.BatchCreateParams.__annotations__) == api_page.OPENAI_BATCH
    assert set(batch_list_params.BatchListParams.__annotations__) == api_page.OPENAI_BATCH_LIST


def test_every_field_is_honoured_or_refused_and_never_both():
    for table in api_page.TABLES:
        honoured, refused = set(table.schema.model_fields), set(table.refused)
        assert not honoured & refused
        assert table.openai <= honoured | refused
        assert all(one.description for name, one in table.schema.model_fields.items() if name != "tool_choice")
