// An MCP server on its standard input and output, with one function, for clients that have functions of such servers.
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js'
import { StdioServerTransport } from '@modelcontextprotocol/sdk/server/stdio.js'
import { z } from 'zod'
import { DEGREES, weather } from './checks.mjs'

const server = new McpServer({ name: 'weather', version: '1.0.0' })
const inputSchema = { city: z.enum(Object.keys(DEGREES)) }
server.registerTool('weather', { description: 'Tell the weather in a city.', inputSchema }, async (given) => ({
  content: [{ type: 'text', text: weather(given) }]
}))
await server.connect(new StdioServerTransport())
