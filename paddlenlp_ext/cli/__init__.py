"""Programs of the scripts in `llm/`: parse the command line, call the library, print the result."""
