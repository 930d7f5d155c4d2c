// The openai package for JavaScript: chat, streams, tools over several turns, structured output by zod, responses.
import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { DEGREES, KEY, MODEL, QUESTION, URL, run, weather } from './checks.mjs'

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0 })
const USER = { role: 'user', content: QUESTION }
const City = z.enum(Object.keys(DEGREES))
const Report = z.object({ city: City, degrees: z.number().int(), words: z.array(z.enum(['warm', 'cold'])).max(2) })
const weatherTool = {
  name: 'weather',
  description: 'Tell the weather in a city.',
  parameters: {
    type: 'object',
    properties: { city: { type: 'string', enum: Object.keys(DEGREES) } },
    required: ['city'],
    additionalProperties: false
  },
  strict: true
}
const TOOL = { type: 'function', function: weatherTool }

async function chat () {
  const answer = await client.chat.completions.create({ model: MODEL, messages: [USER], max_tokens: 40 })
  assert(answer.choices[0].message.content)
  assert(answer.usage.completion_tokens <= 40)
}

async function stream () {
  const asked = { model: MODEL, messages: [USER], max_tokens: 40, temperature: 0 }
  const whole = (await client.chat.completions.create(asked)).choices[0].message.content
  let text = ''
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? ''
  }
  assert.equal(text, whole)
}

async function tools () {
  const messages = [{ role: 'user', content: 'How is the weather in two cities?' }]
  const asked = { model: MODEL, messages, tools: [TOOL], parallel_tool_calls: false, max_tokens: 100 }
  for (const choice of ['required', { type: 'function', function: { name: 'weather' } }]) {
    const answer = await client.chat.completions.create({ ...asked, tool_choice: choice })
    const { message } = answer.choices[0]
    messages.push(message) // as it came
    for (const call of message.tool_calls) {
      const content = weather(JSON.parse(call.function.arguments))
      messages.push({ role: 'tool', tool_call_id: call.id, content })
    }
  }
  assert.equal(messages.length, 5)
  const final = await client.chat.completions.create({ ...asked, tool_choice: 'none' })
  assert(final.choices[0].message.content)
}

async function toolsStreamed () {
  const forced = { tools: [TOOL], tool_choice: 'required', parallel_tool_calls: false }
  const asked = { model: MODEL, messages: [USER], max_tokens: 100, ...forced }
  const [call] = (await client.chat.completions.stream(asked).finalMessage()).tool_calls
  assert(weather(call.function.parsed_arguments).startsWith('It is'))
}

async function toolsRun () {
  // The package's own loop. It forces the one function that is named, and ends after its call.
  const asked = { model: MODEL, messages: [USER], max_tokens: 100, tool_choice: { type: 'function', function: { name: 'weather' } } }
  const tool = { type: 'function', function: { ...weatherTool, function: weather, parse: JSON.parse } }
  const runner = client.chat.completions.runTools({ ...asked, tools: [tool] })
  assert((await runner.finalFunctionToolCallResult()).startsWith('It is'))
}

async function structured () {
  const asked = { model: MODEL, messages: [USER], max_tokens: 120, response_format: zodResponseFormat(Report, 'report') }
  Report.parse((await client.chat.completions.parse(asked)).choices[0].message.parsed)
  Report.parse((await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.parsed)
}

async function responses () {
  const asked = { model: MODEL, max_output_tokens: 120, store: false }
  assert((await client.responses.create({ ...asked, input: QUESTION })).output_text)
  const text = { format: zodTextFormat(Report, 'report') }
  Report.parse((await client.responses.parse({ ...asked, input: QUESTION, text })).output_parsed)
  const tools = [{ type: 'function', ...weatherTool }]
  const input = [USER]
  const called = await client.responses.create({ ...asked, input, tools, tool_choice: 'required', parallel_tool_calls: false })
  for (const item of called.output) {
    input.push(item, { type: 'function_call_output', call_id: item.call_id, output: weather(JSON.parse(item.arguments)) })
  }
  assert(input.length > 1)
  const events = client.responses.stream({ ...asked, input, tools, tool_choice: 'none' })
  assert((await events.finalResponse()).output_text)
}

await run({ chat, stream, tools, toolsStreamed, toolsRun, structured, responses })
