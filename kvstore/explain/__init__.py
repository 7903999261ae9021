"""Why prompts share less of their prefix than they could."""
