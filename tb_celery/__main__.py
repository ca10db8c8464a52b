"""``python -m tb_celery`` is ``tb-celery``."""

from tb_celery.cli import main

main()
