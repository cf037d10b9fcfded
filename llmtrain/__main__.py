from llmtrain.cli.main import main

main()
