// The request as code to copy. The key is never in it.

export const SNIPPETS = {
  curl: ({ path, body }) =>
    `curl -N ${location.origin}${path} \\\n  -H 'content-type: application/json' -H "authorization: Bearer $SLIPSTREAM_API_KEY" \\\n`
    + `  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,

  client: ({ chat, body }) => {
    const { speculation } = body;
    const options = python({
      mixed_arithmetic: body.mixed_arithmetic,
      max_tokens: body.max_tokens, temperature: body.temperature, top_p: body.top_p, seed: body.seed,
      speculation: speculation.disabled ? false : undefined, max_draft_tokens: speculation.max_draft_tokens, drafters: speculation.drafters,
    });
    const [method, input] = chat ? ["chat", literal(body.messages)] : ["generate", literal(body.prompt)];
    const tls = location.protocol === "https:" ? ", tls=True" : "";
    return `import slipstream\n\nwith slipstream.Client("${location.hostname}:${document.body.dataset.grpcPort}"${tls}) as client:\n    print(client.${method}(${input}, ${options}).text)`;
  },

  openai: ({ chat, body }) => {
    const { speculation, prompt, messages, stream, stream_options, mixed_arithmetic, ...options } = body;
    const input = chat ? `messages=${literal(messages)}` : `prompt=${literal(prompt)}`;
    const [method, text] = chat ? ["chat.completions", "message.content"] : ["completions", "text"];
    return `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("SLIPSTREAM_API_KEY", "none"))\n`
      + `answer = client.${method}.create(model="", ${input}, ${python(options)}, extra_body=${literal({ mixed_arithmetic, speculation: { ...speculation, rounds: undefined } })})\n`
      + `print(answer.choices[0].${text})`;
  },
};

const python = (options) => Object.entries(options).filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${literal(value)}`).join(", ");

/** A Python literal. JSON's strings and numbers are Python's. */
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value === true || value === false) return value ? "True" : "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).filter(([, each]) => each !== undefined).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
}
