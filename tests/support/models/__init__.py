"""For tests that need a model: tiny ones of every family, with tokenizers, adapters, routers, engines and generators."""
