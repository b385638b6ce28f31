"""Drafters for SmolLM2-135M-Instruct, from prompts to the heads that come with the package."""
