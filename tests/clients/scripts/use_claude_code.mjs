// Claude Code in its print mode, over /v1/messages: its own prompt and tools, its streams, a tool of an MCP server,
// structured output, counted tokens. The demo model calls no tool by itself, so that calls are forced.
//
// It hides what a server refuses: it asks again with less, or guesses. So its requests go through a recorder, and each
// must be answered.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { createServer, request } from 'node:http'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { promisify } from 'node:util'
import { KEY, MODEL, QUESTION, URL, run } from './checks.mjs'

const here = import.meta.dirname
const claude = join(here, 'node_modules', '.bin', 'claude')
const home = mkdtempSync(join(tmpdir(), 'claude-code-')) // no settings and no sessions of anybody's
const mcpConfig = join(home, 'mcp.json')
const server = { command: process.execPath, args: [join(here, 'weather_server.mjs')] }
writeFileSync(mcpConfig, JSON.stringify({ mcpServers: { weather: server } }))

const answered = [] // [path, status] of each request
const recorder = createServer((asked, answer) => {
  const { method, headers } = asked
  const passed = request(new globalThis.URL(asked.url, URL), { method, headers }, (given) => {
    answered.push([asked.url.split('?')[0], given.statusCode])
    answer.writeHead(given.statusCode, given.headers)
    given.pipe(answer)
  })
  passed.on('error', () => answer.destroy())
  asked.pipe(passed)
})
await new Promise((resolve) => recorder.listen(0, '127.0.0.1', resolve))

// The little that is needed without its own long prompt and tools.
const BRIEF = ['--bare', '--tools', '', '--system-prompt', 'Be brief.']
const WEATHER = ['--mcp-config', mcpConfig, '--strict-mcp-config', '--allowedTools', 'mcp__weather__weather']

// A small model may not come to an end with so long a prompt, which is an error of the client's: a sentence will do.
const ONE_SENTENCE = { stop_sequences: ['.'] }

// Run it to its end, and return the objects that it printed, one for each step. body: what is added to its requests.
async function printed (question, flags, { body = ONE_SENTENCE, format = 'stream-json' } = {}) {
  const env = {
    PATH: process.env.PATH,
    HOME: home,
    ANTHROPIC_BASE_URL: `http://127.0.0.1:${recorder.address().port}`, // it adds /v1 itself
    ANTHROPIC_API_KEY: KEY,
    ANTHROPIC_MODEL: MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1',
    CLAUDE_CODE_MAX_OUTPUT_TOKENS: '400',
    CLAUDE_CODE_MAX_RETRIES: '0',
    CLAUDE_CODE_EXTRA_BODY: JSON.stringify(body)
  }
  const asked = ['-p', '--output-format', format, ...(format === 'stream-json' ? ['--verbose'] : []), ...flags, question]
  const running = promisify(execFile)(claude, asked, { env, cwd: home, maxBuffer: 2 ** 26 })
  running.child.stdin.end()
  // It ends with 1 where its turns ran out: what it printed tells of it.
  answered.length = 0
  const { stdout } = await running.catch((error) => (error.stdout ? error : Promise.reject(error)))
  for (const [path, status] of answered) assert.equal(status, 200, `${path} was answered with ${status}`)
  return stdout.trim().split('\n').map((line) => JSON.parse(line))
}

const blocks = (steps, role) => steps.filter(({ type }) => type === role).flatMap(({ message }) => message.content)

async function chat () {
  const [result] = await printed(QUESTION, BRIEF, { format: 'json' })
  assert.equal(result.is_error, false, result.result)
  assert(result.result)
  assert(result.usage.input_tokens > 0 && result.usage.output_tokens > 0)
}

async function stream () {
  const steps = await printed(QUESTION, [...BRIEF, '--include-partial-messages'])
  const events = steps.filter(({ type }) => type === 'stream_event').map(({ event }) => event)
  const text = events.map(({ delta }) => delta?.text ?? '').join('')
  assert(events.filter(({ type }) => type === 'content_block_delta').length > 1)
  assert.equal(text, blocks(steps, 'assistant').map((block) => block.text).join(''))
}

async function agent () {
  // As it is started by people: its own prompt, which is long, and all of its tools.
  const steps = await printed(QUESTION, [])
  const result = steps.at(-1)
  assert.equal(result.is_error, false, result.result)
  assert(steps.find(({ subtype }) => subtype === 'init').tools.length > 5)
  assert(result.usage.input_tokens + result.usage.cache_read_input_tokens > 5000)
}

async function tools () {
  // Two turns call the function that the MCP server has; another run goes on with the conversation in words.
  const body = { tool_choice: { type: 'any', disable_parallel_tool_use: true } }
  const steps = await printed('How is the weather?', [...BRIEF, ...WEATHER, '--max-turns', '2'], { body })
  const calls = blocks(steps, 'assistant').filter(({ type }) => type === 'tool_use')
  const results = blocks(steps, 'user').filter(({ type }) => type === 'tool_result')
  assert.equal(calls.length, 2)
  assert.equal(results.length, 2)
  for (const { content } of results) assert(content[0].text.startsWith('It is'))
  const session = steps.at(-1).session_id
  const resumed = await printed('Sum up.', [...BRIEF, ...WEATHER, '--resume', session])
  assert.equal(resumed.at(-1).is_error, false, resumed.at(-1).result)
  assert(resumed.at(-1).result)
}

async function structured () {
  const schema = {
    type: 'object',
    properties: { city: { type: 'string', enum: ['Paris', 'Tokyo'] }, warm: { type: 'boolean' } },
    required: ['city', 'warm'],
    additionalProperties: false
  }
  const body = { tool_choice: { type: 'tool', name: 'StructuredOutput', disable_parallel_tool_use: true } }
  const flags = [...BRIEF, '--json-schema', JSON.stringify(schema), '--max-turns', '2']
  const [{ structured_output: output }] = await printed('How is the weather?', flags, { body, format: 'json' })
  assert(['Paris', 'Tokyo'].includes(output.city))
  assert.equal(typeof output.warm, 'boolean')
}

async function tokensCounted () {
  // What it shows of its context is made of counts: of its prompt, of each tool, of each file.
  const [{ result }] = await printed('/context', [], { format: 'json' })
  assert(answered.filter(([path]) => path === '/v1/messages/count_tokens').length > 5)
  assert.match(result, /System tools \| [\d.]+k/)
}

await run({ chat, stream, agent, tools, structured, tokensCounted })
