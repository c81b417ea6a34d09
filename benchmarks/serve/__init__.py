"""What a server in OpenAI's protocol costs next to its engine, and what it leaves after a soak."""
