"""instructor: python instructor_client.py URL."""

import sys

import instructor
import openai
from pydantic import BaseModel


class Answer(BaseModel):
    even: bool


raw = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
found = client.chat.completions.create(
    model="alias", response_model=Answer, messages=[{"role": "user", "content": "Is 2 even?"}], max_retries=0
)
assert isinstance(found.even, bool)
print("done schema")
