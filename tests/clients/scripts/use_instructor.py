"""instructor: objects of a pydantic model, by a forced call, by a JSON schema, whole and as they come."""

import instructor
from checks import KEY, MODEL, QUESTION, URL, City, run, weather
from openai import OpenAI
from pydantic import BaseModel
from report import Report

plain = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
by_call = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)  # forces the call by its name
by_schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
USER = {"role": "user", "content": QUESTION}
ASKED = {"model": MODEL, "messages": [USER], "max_tokens": 120, "max_retries": 0}


class Place(BaseModel):
    """Where the weather is asked for."""

    city: City


def chat():
    # Without a model of what comes back instructor hands the answer of the openai package through.
    answer = by_call.chat.completions.create(**ASKED, response_model=None)
    assert answer.choices[0].message.content


def stream():
    for client in (by_call, by_schema):
        *_, last = client.chat.completions.create_partial(**ASKED, response_model=Report)
        assert Report.model_validate(last.model_dump())


def tools():
    # instructor has calls as objects, and no loop of its own: what a function answers is said in the next message.
    messages = [USER]
    for _ in range(2):
        asked = ASKED | {"messages": messages}
        place, answer = by_call.chat.completions.create_with_completion(**asked, response_model=Place)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather(place.city)})
    final = plain.chat.completions.create(model=MODEL, messages=messages, max_tokens=40)
    assert final.choices[0].message.content


def structured():
    for client in (by_call, by_schema):
        assert isinstance(client.chat.completions.create(**ASKED, response_model=Report), Report)


if __name__ == "__main__":
    run(chat, stream, tools, structured)
