// What the JavaScript scripts share; see checks.py.
import { parseArgs } from 'node:util'

const env = process.env
const { values } = parseArgs({
  options: {
    url: { type: 'string', default: env.SQUADRON_URL ?? 'http://127.0.0.1:8000/v1' },
    model: { type: 'string', default: env.SQUADRON_MODEL ?? 'demo' },
    key: { type: 'string', default: env.SQUADRON_KEY ?? 'none' },
    tokenizer: { type: 'string' } // for scripts in Python
  }
})
export const { url: URL, model: MODEL, key: KEY } = values

export const QUESTION = 'What does os.path.join do?'
export const DEGREES = { Paris: 10, Cologne: 11, Tokyo: 12 }
export const weather = ({ city }) => `It is ${DEGREES[city]} degrees in ${city}.`

export async function run (checks) {
  let failed = 0
  for (const [key, check] of Object.entries(checks)) {
    const name = key.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`) // as the scripts in Python have it
    try {
      await check()
      console.log(`ok ${name}`)
    } catch (error) {
      failed += 1
      console.error(error)
      console.log(`FAILED ${name}: ${`${error.name}: ${error.message}`.replace(/\s+/g, ' ')}`)
    }
  }
  process.exit(failed ? 1 : 0)
}
