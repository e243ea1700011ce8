"""For tests that talk to others: S3, GCS, HDFS and the Hub on loopback, a proxy that breaks them, SGLang's stand-in."""
