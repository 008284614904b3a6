from ds_distill.process.launcher import end_with_launcher

end_with_launcher()  # what is imported next takes seconds

from ds_distill.cli import main  # noqa: E402

main()
