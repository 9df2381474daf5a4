from launch.tools.cli import main

main()
