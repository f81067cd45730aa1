"""The cases of feature columns, as descriptions that any implementation of `feature_column` can build."""

ABOUT = [
    "columns: each is described by {'column': name of the function in feature_column, argument: value}; nested columns likewise."
    " columns is a list; for shared embeddings it is one description, whose function returns the list.",
    "Arguments: {'dtype': name}, {'function': Python text of a function}, {'constant': values of a constant initializer},"
    " {'file': content of a text file whose path is the argument}.",
    "features: dense ones have dtype and values; sparse ones have indices, values and dense_shape.",
    "ids_result: what the categorical column's get_sparse_tensors returns: sparse ids, and weights if the column has them.",
    "dense_result: rows is what DenseFeatures(columns) returns; by_column has the part of each column by its name.",
    "linear_result: the sums of the linear model of Linear* estimators, with 'linear' = its units and sparse_combiner;"
    " the weights are 1, 2, 3, ... per row of a variable, plus 0.5 times the number of the unit; the bias is 0.25;"
    " variables has the shape of each variable by name.",
    "A result with 'exception' is what TensorFlow raises instead.",
    "parse_example_spec: the repr of what make_parse_example_spec(columns) returns.",
]


def dense(values, dtype="float32"):
    """Returns the description of a dense feature."""
    return {"dtype": dtype, "values": values}


def sparse(indices, values, shape, dtype="string"):
    """Returns the description of a sparse feature."""
    return {"dtype": dtype, "indices": indices, "values": values, "dense_shape": shape}


def column(name, **arguments):
    """Returns the description of a column."""
    return {"column": name, **arguments}


def dtype(name):
    """Returns the description of a dtype."""
    return {"dtype": name}


def constant(values):
    """Returns the description of a constant initializer."""
    return {"constant": values}


def case(columns, features, *want, linear=None, about=None):
    """Returns a case: columns, features, and which results are wanted."""
    columns = columns if isinstance(columns, list) else [columns]
    extras = ({"about": about} if about else {}) | ({"linear": linear} if linear else {})
    return {"columns": columns, "features": features, "want": list(want), **extras}


def numeric(key="x", **arguments):
    """Returns the description of a numeric column."""
    return column("numeric_column", key=key, **arguments)


def bucketized(key="x", boundaries=(-1.0, 0.0, 2.5), **arguments):
    """Returns the description of a bucketized column."""
    return column("bucketized_column", source_column=numeric(key, **arguments), boundaries=list(boundaries))


def identity(key="i", num_buckets=4, **arguments):
    """Returns the description of a categorical column with identity."""
    return column("categorical_column_with_identity", key=key, num_buckets=num_buckets, **arguments)


def vocabulary(key="s", words=("red", "green", "blue"), **arguments):
    """Returns the description of a categorical column with a vocabulary list."""
    return column("categorical_column_with_vocabulary_list", key=key, vocabulary_list=list(words), **arguments)


def vocabulary_file(key="s", **arguments):
    """Returns the description of a categorical column with a vocabulary file."""
    content = {"file": "red\ngreen\nblue\nblack\n"}
    return column("categorical_column_with_vocabulary_file", key=key, vocabulary_file=content, **arguments)


def hashed(key="s", buckets=10, **arguments):
    """Returns the description of a categorical column with hash buckets."""
    return column("categorical_column_with_hash_bucket", key=key, hash_bucket_size=buckets, **arguments)


def crossed(keys, buckets=1000, **arguments):
    """Returns the description of a crossed column."""
    return column("crossed_column", keys=keys, hash_bucket_size=buckets, **arguments)


def indicator(categorical):
    """Returns the description of an indicator column."""
    return column("indicator_column", categorical_column=categorical)


def embedding(categorical, **arguments):
    """Returns the description of an embedding column of two dimensions with given weights."""
    weights = constant([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]])
    return column(
        "embedding_column", **{"categorical_column": categorical, "dimension": 2, "initializer": weights} | arguments
    )


def weighted(categorical, **arguments):
    """Returns the description of a weighted categorical column."""
    return column("weighted_categorical_column", categorical_column=categorical, weight_feature_key="w", **arguments)


# Features that several cases have.
WORDS = dense([["red"], ["blue"], ["black"], [""], ["green"]], "string")
FLAT_WORDS = dense(["red", "blue", "black", "", "green"], "string")
TWO_WORDS = dense([["red", "blue"], ["green", ""], ["", ""], ["red", "red"], ["white", "blue"]], "string")
PLACES = [[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]]
SPARSE_WORDS = sparse(PLACES, ["red", "blue", "white", "red", "red", "green"], [4, 3])
SPARSE_IDS = sparse(PLACES, [0, 3, 1, 2, 2, 0], [4, 3], "int64")
WEIGHTS = sparse(PLACES, [0.5, 2.0, 1.0, -1.0, 3.0, 0.25], [4, 3], "float32")
NUMBERS = dense([-1.5, -1.0, -0.5, 0.0, 1.0, 2.5, 3.0])
IDS = dense([[0], [3], [1], [-1], [2]], "int64")
LONG = "the quick brown fox jumps over the lazy dog and runs into the forest, "


def strings():
    """Returns strings of every length at which Fingerprint64 changes its method."""
    lengths = [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        96,
        127,
        128,
        129,
        191,
        192,
        193,
        300,
    ]
    return [(LONG * 5)[:length] for length in lengths] + ["0", "1", "-1", "42", "red", "blue", "größe", "日本", "a\nb"]


def cases():
    """Returns every case by name."""
    return (
        numeric_cases()
        | bucketized_cases()
        | identity_cases()
        | vocabulary_cases()
        | hash_cases()
        | cross_cases()
        | embedding_cases()
        | weighted_cases()
        | mixed_cases()
        | linear_cases()
    )


def numeric_cases():
    """Returns the cases of numeric columns."""
    square = dense([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    function = {"function": "lambda x: (x - 3.0) / 2.0"}
    return {
        "numeric of a vector": case(numeric(), {"x": NUMBERS}, "dense"),
        "numeric of a column": case(numeric(), {"x": dense([[1.0], [2.0]])}, "dense"),
        "numeric of integers": case(numeric(), {"x": dense([1, 2, 3], "int64")}, "dense"),
        "numeric of float64": case(numeric(), {"x": dense([1.5, 2.0, 3.0], "float64")}, "dense"),
        "numeric with shape 3": case(numeric(shape=[3]), {"x": dense([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}, "dense"),
        "numeric with shape as a number": case(
            numeric(shape=3), {"x": dense([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}, "dense"
        ),
        "numeric with shape 2x2": case(numeric(shape=[2, 2]), {"x": square}, "dense"),
        "numeric with a normalizer": case(numeric(normalizer_fn=function), {"x": NUMBERS}, "dense"),
        "numeric with a default": case(numeric(default_value=7.0), {"x": NUMBERS}, "dense"),
        "numeric with a default per place": case(
            numeric(shape=[2], default_value=[1.0, 2.0]), {"x": dense([[1.0, 2.0]])}, "dense"
        ),
        "numeric with a wrong shape": case(numeric(shape=[2]), {"x": dense([[1.0, 2.0, 3.0]])}, "dense"),
        "numeric of a scalar": case(numeric(), {"x": dense(1.0)}, "dense"),
        "numeric of strings": case(numeric(), {"x": dense([["1.5"], ["2"]], "string")}, "dense"),
        "numeric of a sparse feature": case(numeric(), {"x": sparse([[0, 0]], [1.0], [2, 1], "float32")}, "dense"),
        "numeric with dtype string": case(numeric(dtype=dtype("string")), {"x": NUMBERS}, "dense"),
        "numeric with shape 0": case(numeric(shape=[0]), {"x": NUMBERS}, "dense"),
        "numeric with a default of wrong shape": case(numeric(shape=[2], default_value=[1.0]), {"x": NUMBERS}, "dense"),
        "numeric with a normalizer that is none": case(numeric(normalizer_fn=3), {"x": NUMBERS}, "dense"),
        "numeric whose feature is missing": case(numeric("y"), {"x": NUMBERS}, "dense"),
    }


def bucketized_cases():
    """Returns the cases of bucketized columns."""
    pairs = dense([[-1.0, 2.5], [0.0, -2.0], [9.0, 0.1]])
    return {
        "bucketized of a vector": case(bucketized(), {"x": NUMBERS}, "dense", "ids"),
        "bucketized of pairs": case(bucketized(shape=[2]), {"x": pairs}, "dense", "ids"),
        "bucketized of one boundary": case(bucketized(boundaries=[0.0]), {"x": NUMBERS}, "dense", "ids"),
        "bucketized of integers": case(
            bucketized(boundaries=[1, 3], dtype=dtype("int64")), {"x": dense([0, 1, 2, 3, 4], "int64")}, "dense", "ids"
        ),
        "bucketized with boundaries out of order": case(bucketized(boundaries=[1.0, 0.0]), {"x": NUMBERS}, "dense"),
        "bucketized without boundaries": case(bucketized(boundaries=[]), {"x": NUMBERS}, "dense"),
        "bucketized of a categorical column": case(
            column("bucketized_column", source_column=identity(), boundaries=[1.0]), {"i": IDS}, "dense"
        ),
    }


def identity_cases():
    """Returns the cases of categorical columns with identity."""
    beyond = dense([[0], [7], [-2], [-1]], "int64")
    return {
        "identity": case(identity(), {"i": IDS}, "ids"),
        "identity of a vector": case(identity(), {"i": dense([0, 3, 1], "int64")}, "ids"),
        "identity of int32": case(identity(), {"i": dense([[0], [3]], "int32")}, "ids"),
        "identity of a sparse feature": case(identity(), {"i": SPARSE_IDS}, "ids"),
        "identity beyond the buckets": case(identity(), {"i": beyond}, "ids"),
        "identity beyond the buckets with a default": case(identity(default_value=1), {"i": beyond}, "ids"),
        "identity of floats": case(identity(), {"i": dense([[0.0]])}, "ids"),
        "identity with a default beyond the buckets": case(identity(default_value=4), {"i": IDS}, "ids"),
        "identity without buckets": case(identity(num_buckets=0), {"i": IDS}, "ids"),
        "indicator of identity": case(indicator(identity()), {"i": IDS}, "dense"),
        "indicator of a sparse identity": case(indicator(identity()), {"i": SPARSE_IDS}, "dense"),
        "indicator of identity beyond the buckets": case(indicator(identity()), {"i": beyond}, "dense"),
        "indicator of identity beyond the buckets with a default": case(
            indicator(identity(default_value=1)), {"i": beyond}, "dense"
        ),
        "embedding of identity beyond the buckets": case(embedding(identity()), {"i": beyond}, "dense"),
        "a categorical column is not dense": case(identity(), {"i": IDS}, "dense"),
    }


def vocabulary_cases():
    """Returns the cases of vocabularies, in a list and in a file."""
    numbers = dense([[10], [30], [99], [-1], [20]], "int64")
    return {
        "vocabulary list": case(vocabulary(), {"s": WORDS}, "ids"),
        "vocabulary list of a vector": case(vocabulary(), {"s": FLAT_WORDS}, "ids"),
        "vocabulary list of pairs": case(vocabulary(), {"s": TWO_WORDS}, "ids"),
        "vocabulary list of a sparse feature": case(vocabulary(), {"s": SPARSE_WORDS}, "ids"),
        "vocabulary list with a default": case(vocabulary(default_value=1), {"s": WORDS}, "ids"),
        "vocabulary list with buckets for others": case(vocabulary(num_oov_buckets=3), {"s": TWO_WORDS}, "ids"),
        "vocabulary list of integers": case(vocabulary("n", [10, 20, 30]), {"n": numbers}, "ids"),
        "vocabulary list of integers with buckets for others": case(
            vocabulary("n", [10, 20, 30], num_oov_buckets=2), {"n": numbers}, "ids"
        ),
        "vocabulary list of integers for strings": case(vocabulary("s", [10, 20]), {"s": WORDS}, "ids"),
        "vocabulary list of int32": case(
            vocabulary("n", [10, 20, 30], dtype=dtype("int32")), {"n": dense([[10], [20]], "int32")}, "ids"
        ),
        "vocabulary list with duplicates": case(vocabulary("s", ["a", "a"]), {"s": WORDS}, "ids"),
        "vocabulary list that is empty": case(vocabulary("s", []), {"s": WORDS}, "ids"),
        "vocabulary list with default and buckets": case(
            vocabulary(default_value=1, num_oov_buckets=1), {"s": WORDS}, "ids"
        ),
        "vocabulary list with negative buckets": case(vocabulary(num_oov_buckets=-1), {"s": WORDS}, "ids"),
        "vocabulary list of floats": case(vocabulary("s", [1.5, 2.5]), {"s": WORDS}, "ids"),
        "indicator of a vocabulary list": case(indicator(vocabulary()), {"s": WORDS}, "dense"),
        "indicator of pairs": case(indicator(vocabulary()), {"s": TWO_WORDS}, "dense"),
        "indicator with buckets for others": case(
            indicator(vocabulary(num_oov_buckets=2)), {"s": SPARSE_WORDS}, "dense"
        ),
        "vocabulary file": case(vocabulary_file(), {"s": WORDS}, "ids"),
        "vocabulary file of which three lines count": case(vocabulary_file(vocabulary_size=3), {"s": WORDS}, "ids"),
        "vocabulary file with a default": case(vocabulary_file(default_value=0), {"s": TWO_WORDS}, "ids"),
        "vocabulary file with buckets for others": case(vocabulary_file(num_oov_buckets=3), {"s": TWO_WORDS}, "ids"),
        "vocabulary file that is too short": case(vocabulary_file(vocabulary_size=9), {"s": WORDS}, "ids"),
        "vocabulary file with size and buckets": case(
            vocabulary_file(vocabulary_size=2, num_oov_buckets=2), {"s": WORDS}, "ids"
        ),
        "vocabulary file of integers": case(
            column(
                "categorical_column_with_vocabulary_file",
                key="n",
                vocabulary_file={"file": "10\n20\n30\n"},
                dtype=dtype("int64"),
            ),
            {"n": numbers},
            "ids",
        ),
        "indicator of a vocabulary file": case(indicator(vocabulary_file()), {"s": WORDS}, "dense"),
    }


def hash_cases():
    """Returns the cases of hash buckets."""
    many = dense([[text] for text in strings()], "string")
    numbers = dense([[0], [1], [-1], [42], [123456789012], [-7]], "int64")
    integers = hashed("n", 1000, dtype=dtype("int64"))
    return {
        "hash of strings": case(hashed("s", 1000), {"s": many}, "ids"),
        "hash of strings into few buckets": case(hashed("s", 3), {"s": many}, "ids"),
        "hash of strings into many buckets": case(hashed("s", 2**62), {"s": many}, "ids"),
        "hash of integers": case(integers, {"n": numbers}, "ids", about="-1 counts as missing; others hash as text"),
        "hash of int32": case(hashed("n", 1000, dtype=dtype("int32")), {"n": dense([[0], [7]], "int32")}, "ids"),
        "hash of a vector of integers": case(integers, {"n": dense([5, 6, 7], "int64")}, "ids"),
        "hash of a sparse feature": case(hashed(), {"s": SPARSE_WORDS}, "ids"),
        "hash of integers for a column of strings": case(hashed(), {"s": IDS}, "ids"),
        "hash without buckets": case(hashed("s", 0), {"s": WORDS}, "ids"),
        "hash of floats": case(hashed("s", 5, dtype=dtype("float32")), {"s": dense([[1.0]])}, "ids"),
        "indicator of a hash": case(indicator(hashed("s", 5)), {"s": TWO_WORDS}, "dense"),
    }


def cross_cases():
    """Returns the cases of crossed columns."""
    words = {
        "s": dense([["red"], ["blue"], [""], ["green"]], "string"),
        "t": dense([["x"], ["y"], ["x"], ["longer text here"]], "string"),
    }
    numbers = {"x": dense([-1.5, 0.0, 1.0, 3.0]), "i": dense([[0], [3], [1], [2]], "int64")}
    everything = words | numbers
    pairs = {"s": TWO_WORDS, "t": dense([["x", "y"], ["y", ""], ["x", "x"], ["", "z"], ["z", "y"]], "string")}
    sparse_pair = {"s": SPARSE_WORDS, "t": sparse([[0, 0], [1, 0], [3, 0], [3, 1]], ["x", "y", "y", "z"], [4, 2])}
    return {
        "cross of strings": case(crossed(["s", "t"]), words, "ids"),
        "cross of strings into many buckets": case(crossed(["s", "t"], 2**60), words, "ids"),
        "cross of strings with a key": case(crossed(["s", "t"], 2**60, hash_key=12345), words, "ids"),
        "cross of strings in the other order": case(crossed(["t", "s"], 2**60), words, "ids"),
        "cross of strings and buckets": case(crossed(["s", bucketized()], 2**60), everything, "ids"),
        "cross of strings and buckets, small": case(crossed(["s", bucketized()], 10), everything, "ids"),
        "cross of buckets": case(crossed([bucketized(), bucketized("x", [0.5])], 2**60), everything, "ids"),
        "cross of three": case(crossed(["s", "t", bucketized()], 2**60), everything, "ids"),
        "cross of strings and identity": case(crossed(["s", identity()], 2**60), everything, "ids"),
        "cross of strings and a vocabulary": case(crossed(["t", vocabulary()], 2**60), everything, "ids"),
        "cross of a cross": case(crossed([crossed(["s", "t"], 100), bucketized()], 2**60), everything, "ids"),
        "cross of pairs": case(crossed(["s", "t"], 2**60), pairs, "ids"),
        "cross of pairs and buckets of pairs": case(
            crossed(["s", bucketized(shape=[2])], 2**60),
            {"s": TWO_WORDS, "x": dense([[-1.5, 0.0], [1.0, 3.0], [0.0, 0.0], [9.0, -9.0], [2.5, 2.0]])},
            "ids",
        ),
        "cross of sparse features": case(crossed(["s", "t"], 2**60), sparse_pair, "ids"),
        "cross of integers by key": case(crossed(["i", "s"], 2**60), everything, "ids"),
        "cross of a vector of strings": case(
            crossed(["s", "t"]), {"s": dense(["a", "b"], "string"), "t": dense(["x", "y"], "string")}, "ids"
        ),
        "cross of one": case(crossed(["s"]), words, "ids"),
        "cross of a hash": case(crossed([hashed(), "t"]), words, "ids"),
        "cross of a numeric column": case(crossed([numeric(), "t"]), everything, "ids"),
        "cross of floats by key": case(crossed(["x", "t"]), everything, "ids"),
        "cross without buckets": case(crossed(["s", "t"], 0), words, "ids"),
        "indicator of a cross": case(indicator(crossed(["s", bucketized()], 6)), everything, "dense"),
    }


def embedding_cases():
    """Returns the cases of embeddings and of shared embeddings."""
    shared = {
        "column": "shared_embeddings",
        "categorical_columns": [identity("i"), identity("j")],
        "dimension": 2,
        "initializer": constant([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [13.0, 17.0]]),
    }
    ids = {"i": SPARSE_IDS, "j": sparse([[0, 0], [1, 0], [1, 1]], [3, 1, 2], [4, 2], "int64")}
    two = {"categorical_column": identity(), "dimension": 2}
    return {
        f"embedding by {combiner}": case(embedding(identity(), combiner=combiner), {"i": SPARSE_IDS}, "dense")
        for combiner in ("mean", "sqrtn", "sum", "max")
    } | {
        "embedding": case(embedding(identity()), {"i": IDS}, "dense"),
        "embedding with a largest norm": case(embedding(identity(), max_norm=4.0), {"i": SPARSE_IDS}, "dense"),
        "embedding of a vocabulary": case(embedding(vocabulary(num_oov_buckets=1)), {"s": SPARSE_WORDS}, "dense"),
        "embedding of missing words": case(
            embedding(vocabulary("s", ["red", "green", "blue", "pink"])), {"s": WORDS}, "dense"
        ),
        "embedding without dimension": case(embedding(identity(), dimension=0), {"i": IDS}, "dense"),
        "embedding with a wrong initializer": case(embedding(identity(), initializer=3), {"i": IDS}, "dense"),
        "embedding from a checkpoint without a name": case(
            column("embedding_column", ckpt_to_load_from="x", **two), {"i": IDS}, "dense"
        ),
        "shared embeddings": case([], ids, "dense") | {"columns": shared},
        "shared embeddings by sum": case([], ids, "dense") | {"columns": shared | {"combiner": "sum"}},
        "shared embeddings with a name": case([], ids, "dense")
        | {"columns": shared | {"shared_embedding_collection_name": "both"}},
        "shared embeddings of different kinds": case([], ids, "dense")
        | {"columns": shared | {"categorical_columns": [identity("i"), vocabulary("j")]}},
    }


def weighted_cases():
    """Returns the cases of weighted categorical columns."""
    features = {"i": SPARSE_IDS, "w": WEIGHTS}
    rows = {"i": dense([[0, 2], [3, 3], [-1, 1]], "int64"), "w": dense([[0.5, 2.0], [1.0, 4.0], [9.0, 0.0]])}
    return {
        f"weighted embedding by {combiner}": case(embedding(weighted(identity()), combiner=combiner), features, "dense")
        for combiner in ("mean", "sqrtn", "sum")
    } | {
        "weighted": case(weighted(identity()), features, "ids"),
        "weighted of dense features": case(weighted(identity()), rows, "ids"),
        "weighted with weights of another shape": case(
            weighted(identity()),
            {"i": SPARSE_IDS, "w": sparse(PLACES[:2], [0.5, 2.0], [4, 3], "float32")},
            "ids",
            "dense",
        ),
        "weighted indicator": case(indicator(weighted(identity())), features, "dense"),
        "weighted indicator with other weights": case(
            indicator(weighted(identity())),
            {"i": SPARSE_IDS, "w": sparse(PLACES[:2], [0.5, 2.0], [4, 3], "float32")},
            "dense",
        ),
        "weighted vocabulary": case(indicator(weighted(vocabulary())), {"s": SPARSE_WORDS, "w": WEIGHTS}, "dense"),
        "weighted by integers": case(
            weighted(identity(), dtype=dtype("int64")),
            {"i": SPARSE_IDS, "w": sparse(PLACES, [1, 2, 3, 4, 5, 6], [4, 3], "int64")},
            "ids",
        ),
        "weighted by strings": case(weighted(identity(), dtype=dtype("string")), features, "ids"),
        "weighted without its weights": case(weighted(identity()), {"i": SPARSE_IDS}, "ids"),
    }


def mixed_cases():
    """Returns the cases of several columns: their order in the rows, and lists that cannot work."""
    features = {"b": dense([1.0, 2.0]), "a": dense([[10.0, 20.0], [30.0, 40.0]]), "i": dense([[0], [3]], "int64")}
    return {
        "several columns": case(
            [
                numeric("b"),
                numeric("a", shape=[2]),
                indicator(identity()),
                bucketized("b", [1.5]),
                embedding(identity()),
            ],
            features,
            "dense",
            about="the parts are in the order of the columns' names",
        ),
        "the same column twice": case([numeric("b"), numeric("b")], features, "dense"),
        "two columns of one feature": case([numeric("b"), bucketized("b", [1.5])], features, "dense"),
        "rows that differ in number": case(
            [numeric("b"), numeric("c")], features | {"c": dense([1.0, 2.0, 3.0])}, "dense"
        ),
        "something that is not a column": case(["b"], features, "dense"),
    }


def linear_cases():
    """Returns the cases of the linear model of the Linear* estimators."""
    words = {"s": SPARSE_WORDS, "i": SPARSE_IDS, "w": WEIGHTS, "x": dense([-1.5, 0.0, 1.0, 3.0])}
    lists = [vocabulary(), identity(), weighted(identity("i")), bucketized(), numeric()]
    results = {
        f"linear sums by {combiner} with {units} units": case(
            [lists[0], lists[2], lists[3], lists[4]],
            words,
            "linear",
            linear={"units": units, "sparse_combiner": combiner},
        )
        for combiner in ("sum", "mean", "sqrtn")
        for units in (1, 2)
    }
    settings = {"units": 1, "sparse_combiner": "sum"}
    return results | {
        "linear sums of a cross": case(crossed(["s", bucketized()], 6), words, "linear", linear=settings),
        "linear sums of a numeric column of three": case(
            numeric(shape=[3]), {"x": dense([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}, "linear", linear=settings
        ),
        "linear sums of identity beyond the buckets": case(
            identity(), {"i": dense([[0], [7], [-2], [-1]], "int64")}, "linear", linear=settings
        ),
        "linear sums of an embedding": case(embedding(identity()), words, "linear", linear=settings),
    }
