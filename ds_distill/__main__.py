from ds_distill.cli import main

main()
