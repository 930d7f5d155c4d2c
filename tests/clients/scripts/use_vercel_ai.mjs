// The Vercel AI SDK, with its provider for OpenAI-compatible servers.
import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { DEGREES, KEY, MODEL, QUESTION, URL, run, weather } from './checks.mjs'

const squadron = createOpenAICompatible({ name: 'squadron', baseURL: URL, apiKey: KEY, supportsStructuredOutputs: true, includeUsage: true })
const asked = { model: squadron(MODEL), prompt: QUESTION, maxOutputTokens: 100, temperature: 0, maxRetries: 0 }
const City = z.enum(Object.keys(DEGREES))
const Report = z.object({ city: City, degrees: z.number().int(), words: z.array(z.enum(['warm', 'cold'])).max(2) })
const tools = {
  weather: tool({ description: 'Tell the weather in a city.', inputSchema: z.object({ city: City }), execute: weather })
}

async function chat () {
  const { text, usage } = await generateText({ ...asked, system: 'Be brief.' })
  assert(text)
  assert(usage.outputTokens > 0 && usage.outputTokens <= 100)
}

async function stream () {
  const { text } = await generateText(asked)
  const streamed = streamText(asked)
  let pieces = ''
  for await (const piece of streamed.textStream) pieces += piece
  assert.equal(pieces, text)
}

// Any function, this one, and then words: its loop goes on to the first step without a call.
const CHOICES = ['required', { type: 'tool', toolName: 'weather' }, 'none']
const overTurns = {
  ...asked,
  tools,
  stopWhen: stepCountIs(4),
  prepareStep: ({ stepNumber }) => ({ toolChoice: CHOICES[stepNumber] })
}

function checkSteps (steps) {
  assert.equal(steps.length, 3)
  for (const { toolResults, finishReason } of steps.slice(0, 2)) {
    assert(toolResults.length)
    assert(toolResults.every(({ output }) => output.startsWith('It is')))
    assert.equal(finishReason, 'tool-calls')
  }
  assert(steps[2].text)
}

async function toolsOverTurns () {
  checkSteps((await generateText(overTurns)).steps)
}

async function toolsStreamed () {
  checkSteps(await streamText(overTurns).steps)
}

async function structured () {
  const output = Output.object({ schema: Report })
  Report.parse((await generateText({ ...asked, output })).output)
  const streamed = streamText({ ...asked, output })
  for await (const part of streamed.partialOutputStream) assert.equal(typeof part, 'object')
  Report.parse(await streamed.output)
}

await run({ chat, stream, tools: toolsOverTurns, toolsStreamed, structured })
