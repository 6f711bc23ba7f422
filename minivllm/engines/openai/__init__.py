"""engine=openai: any OpenAI-compatible server, over HTTP."""
